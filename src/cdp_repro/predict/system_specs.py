"""The systems of the field that are compared at the same sizes: mode and placement of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from cdp_repro.schedule import MODES, Program, Schedule, Spec
from cdp_repro.schedule.branches import Sources

SYSTEMS = (
    ("dp", "replicated"), ("cdp_v1", "replicated"), ("cdp_v2", "replicated"),
    ("dp", "zero"), ("cdp_v1", "zero"), ("cdp_v2", "zero"), ("dp", "parameter_server"), ("cdp_v2", "parameter_server"),
    ("ssp", "parameter_server"), ("async", "parameter_server"),
    ("naive", "pipeline"), ("gpipe", "pipeline"), ("one_f_one_b", "pipeline"), ("interleaved", "pipeline"),
    ("zero_bubble", "pipeline"), ("terapipe", "pipeline"), ("chimera", "pipeline"), ("pipedream_2bw", "pipeline"),
    ("cdp_v2", "pipeline"), ("pipedream", "pipeline"), ("ampnet", "pipeline"),
)  # fmt: skip
"""Mode and placement of all systems on the same number of ranks that compute; servers come on top. On a pipeline,
`cdp_v1` is `pipedream_2bw`."""

ON_OTHER_RANKS = {"model_parallel": ("dp", "cdp_v1", "cdp_v2"), "single_device": ("accumulation",)}
"""Placements, with modes, that use more or fewer ranks for the same number of workers and so are not compared."""

CHUNKS = 2
"""Stages for each rank into which the interleaved pipeline cuts the model; all other systems have one."""


@dataclass(frozen=True)
class CommonSizes:
    """The sizes that all compared systems share: `ranks`, and `ranks` x `accumulate` micro-batches per mini-batch."""

    ranks: int
    accumulate: int = 1
    tokens: int = 0
    """Tokens of a sequence that a causal model reads; 0 if samples cannot be cut along tokens."""
    branches: Callable[[int], Sources] | None = None
    """Number of stages -> which stages read which; None: a chain."""
    slot_order: str = "paper"
    own: Spec | None = None
    """What the user has chosen, if its mode or placement is in none of `SYSTEMS`."""

    def spec(self, mode: str, placement: str) -> Spec:
        """Return a system with these sizes.

        Raises:
            ValueError: the system cannot have these sizes, such as an odd number of ranks for Chimera.
        """
        slices = MODES[mode].slices(None)
        if slices > 1 and not self.tokens:
            raise ValueError(f"samples without tokens cannot be cut into {slices} slices: use dataset=text model=gpt")
        if self.tokens % slices:
            works = self.tokens + slices - self.tokens % slices
            raise ValueError(f"{self.tokens} tokens cannot be cut into {slices} slices: use model.context={works}")
        stages = self.ranks * CHUNKS if mode == "interleaved" else self.ranks
        accumulate = 1 if MODES[mode].updates_each or MODES[mode].has_own_clocks else self.accumulate
        sources = self.branches(stages) if self.branches else None
        spec = Spec(mode, self.ranks, stages, placement, self.slot_order, accumulate, sources=sources)
        Schedule.from_spec(spec)
        return spec

    def own_spec(self) -> Spec | None:
        """Return what the user has chosen, with these sizes; None if it is compared in any case.

        Raises:
            ValueError: it cannot have these sizes, or it has another number of ranks.
        """
        if self.own is None:
            return None
        spec = replace(self.own, workers=self.ranks, stages=self.ranks, ranks=None, accumulate=self.accumulate)
        ranks = Program(Schedule.from_spec(spec)).schedule.ranks
        servers = spec.sizes.servers if spec.placement == "parameter_server" else 0  # they come on top, as in `SYSTEMS`
        if ranks != self.ranks + servers:
            raise ValueError(f"on placement={spec.placement} it has {ranks} ranks, all others {self.ranks}")
        return spec

    def specs(self) -> Iterator[Spec]:
        """Yield all systems that can have these sizes."""
        for mode, placement in SYSTEMS:
            with suppress(ValueError):
                yield self.spec(mode, placement)
        with suppress(ValueError):
            if spec := self.own_spec():
                yield spec


def is_compared(spec: Spec) -> bool:
    """Whether a system is compared in any case, or left out as it needs other ranks.

    On a pipeline all our modes are, some under the name of another: `cdp_v1` is `pipedream_2bw`, `dp` is `gpipe` or
    `one_f_one_b`.
    """
    modes = {mode for mode, _ in (*SYSTEMS, ("accumulation", ""))}
    of_all_modes = {"pipeline", *ON_OTHER_RANKS}
    return (spec.mode, spec.placement) in SYSTEMS or (spec.mode in modes and spec.placement in of_all_modes)
