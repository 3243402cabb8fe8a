"""The systems of the field that are compared on the same sizes: mode and placement of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from cdp_repro.schedule import MODES, Schedule, Spec
from cdp_repro.schedule.branches import Sources

SYSTEMS = (
    ("dp", "replicated"), ("cdp_v1", "replicated"), ("cdp_v2", "replicated"),
    ("dp", "zero"), ("cdp_v1", "zero"), ("cdp_v2", "zero"), ("dp", "parameter_server"), ("cdp_v2", "parameter_server"),
    ("ssp", "parameter_server"), ("async", "parameter_server"),
    ("naive", "pipeline"), ("gpipe", "pipeline"), ("one_f_one_b", "pipeline"), ("interleaved", "pipeline"),
    ("zero_bubble", "pipeline"), ("terapipe", "pipeline"), ("chimera", "pipeline"), ("pipedream_2bw", "pipeline"),
    ("cdp_v2", "pipeline"), ("pipedream", "pipeline"), ("ampnet", "pipeline"),
)  # fmt: skip
"""Mode and placement of all that compute on as many ranks. On a pipeline `cdp_v1` is `pipedream_2bw`."""

ON_OTHER_RANKS = {"model_parallel": ("dp", "cdp_v1", "cdp_v2"), "single_device": ("accumulation",)}
"""Placements on which as many workers compute on more or fewer ranks, so that they are not compared; with modes."""

CHUNKS = 2
"""Stages a rank of the interleaved pipeline; all others have one."""


@dataclass(frozen=True)
class CommonSizes:
    """What all systems that are compared have: so many ranks, and `ranks` x `accumulate` micro-batches a mini-batch."""

    ranks: int
    accumulate: int = 1
    tokens: int = 0
    """Of a sequence that a causal model reads; 0 if samples cannot be cut along tokens."""
    branches: Callable[[int], Sources] | None = None
    """Which of so many stages read which; None: a chain."""

    def spec(self, mode: str, placement: str) -> Spec:
        """Return a system of these sizes.

        Raises:
            ValueError: it cannot have them, such as an odd number of ranks for Chimera.
        """
        slices = MODES[mode].slices(None)
        if slices > 1 and not self.tokens:
            raise ValueError(f"samples without tokens cannot be cut into {slices} slices: use dataset=text model=gpt")
        if self.tokens % slices:
            works = self.tokens + slices - self.tokens % slices
            raise ValueError(f"{self.tokens} tokens cannot be cut into {slices} slices: use model.context={works}")
        stages = self.ranks * CHUNKS if mode == "interleaved" else self.ranks
        accumulate = 1 if MODES[mode].updates_each or MODES[mode].pushes else self.accumulate
        sources = self.branches(stages) if self.branches else None
        spec = Spec(mode, self.ranks, stages, placement, accumulate=accumulate, sources=sources)
        Schedule.of(spec)
        return spec

    def specs(self) -> Iterator[Spec]:
        """Yield all systems that can have these sizes."""
        for mode, placement in SYSTEMS:
            with suppress(ValueError):
                yield self.spec(mode, placement)
