"""A training whose numbers are no longer finite: how it is noticed, and what its user can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdp_repro.config import RunConfig


class DivergedError(RuntimeError):
    """A loss, a parameter or the last evaluation is not finite."""


@dataclass(frozen=True)
class Divergence:
    """The first training step whose loss is not finite."""

    step: int
    loss: float
    """Mean over the micro-batches."""
    losses: Sequence[float]
    """Of each micro-batch."""

    def told(self, config: RunConfig, saved_states: str) -> str:
        """Return what to tell a user. Before the first update, no learning rate is to blame."""
        weights = config.model.weights
        unmoved = "No update has been made yet: look at " + ("the data" if weights is None else f"the file {weights}")
        return (
            f"the loss of training step {self.step} is {self.loss} (micro-batches: {[*self.losses]}); {saved_states}. "
            f"{advice_for(config) if self.step else unmoved}"
        )


def stage_that_is_not_finite(state: Mapping[str, Any]) -> int | None:
    """Return the first stage of an engine's state that has a parameter that is not finite; None if none has."""
    for number, stage in enumerate(state.get("stages", ())):
        tensors = [each for version in stage["versions"].values() for each in version.values()]
        if not all(each.isfinite().all() for each in tensors):
            return number
    return None


def advice_for(config: RunConfig) -> str:
    """Return what a user can do about a run that diverges."""
    optim, delay = config.optim, config.delay
    return f"Try a smaller optim.lr than {optim.lr} or a longer optim.warmup_epochs than {optim.warmup_epochs}" + (
        "" if delay.name == "none" else f", or another delay than {delay.name}"
    )
