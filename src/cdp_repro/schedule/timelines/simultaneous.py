"""Data parallelism: all workers compute the same stage at once."""

from __future__ import annotations

from functools import cached_property

from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.timelines.timeline import Straight


class Simultaneous(Straight):
    """All workers run stage j forward in slot j and backward in slot 2S-1-j; k micro-batches one after the other.

    With speeds, a worker takes d slots for each, and all wait for the slowest. Gradients are added in the order of the
    micro-batches, so the fastest workers then have the first ones.

    N = S = 3, k = 1 (F0 = forward of stage 0):

        slot      0  1  2  3  4  5
        worker 0  F0 F1 F2 B2 B1 B0
        worker 1  F0 F1 F2 B2 B1 B0
        worker 2  F0 F1 F2 B2 B1 B0
    """

    name = "simultaneous"
    has_exclusive_stages = False
    is_simultaneous = True

    @property
    def period(self) -> int:
        """2S ceil(M / (R N)), times the slots that the slowest worker takes for a forward."""
        return self._length * -(-self.sizes.turns // self.sizes.workers)

    def begin(self, i: int) -> int:
        """Return the end of the slowest worker's previous micro-batch."""
        return self._length * (i // self.sizes.workers)

    @cached_property
    def lanes(self) -> Lanes:
        """The workers in turn; with speeds, the fastest first."""
        if not self.sizes.speeds:
            return super().lanes
        order = sorted((ticks, worker) for worker, (ticks,) in enumerate(self.sizes.ticks.durations))
        return Lanes(self.sizes.lanes, tuple(worker for _, worker in order), tuple(ticks for ticks, _ in order))

    @cached_property
    def _length(self) -> int:
        return 2 * self.sizes.stages * max(self.lanes.durations, default=1)
