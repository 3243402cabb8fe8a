"""Equivalence of a placement with one device: what a comparison of a few training steps finds.

No torch is imported here: the ranks train and compare, and their starter only needs to know what they found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.config import RunConfig
from cdp_repro.launch import launch
from cdp_repro.training.rank_imports import rank_imports


@dataclass(frozen=True)
class Comparison:
    """Largest differences from one device, each over the largest value compared."""

    losses: float
    stages: list[float]
    """By stage, over all versions, optimizer states and buffers."""
    ranks: int
    steps: int
    tolerance: float
    dropout: float = 0.0
    """Probability with which the model dropped activations, if it has dropout layers."""
    copies: Sequence[str] = ()
    """What ranks that hold the same stage have differently: the stages compared are each of one rank."""

    @property
    def agrees(self) -> bool:
        """Whether no difference is above the tolerance, and all ranks have the same of what they share."""
        return max(self.losses, *self.stages) <= self.tolerance and not self.copies


def verify(config: RunConfig, steps: int) -> Comparison | None:
    """Train `steps` steps on the placement of `config` and on one device, with a drain in the middle; compare.

    Under torchrun or srun every rank must call it; those other than rank 0, which compares, get None. On our engine,
    models that have dropout layers drop activations.

    The tolerance is 0 for our own sums on CPUs. It is that of the precision for baselines and collectives, and on GPUs,
    whose kernels may depend on other work.

    Raises:
        ConfigError: there is no tolerance for the precision.
    """
    found: Comparison | None = launch(
        _compare, (config, steps), config.processes, config.grace_seconds, rank_imports(config)
    )
    return found


def _compare(config: RunConfig, steps: int) -> Comparison | None:
    from cdp_repro.training.comparing import compare  # here: torch takes seconds

    return compare(config, steps)
