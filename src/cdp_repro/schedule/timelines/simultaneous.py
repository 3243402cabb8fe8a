"""Data parallelism: all workers compute the same stage at once."""

from __future__ import annotations

from functools import cached_property

from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.timelines.timeline import Timeline


class Simultaneous(Timeline):
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

    @property
    def period(self) -> int:
        """2S ceil(M / (R N)), times the slots that the slowest worker takes for a forward."""
        return self._length * -(-self.sizes.turns // self.sizes.workers)

    def forward(self, i: int, j: int) -> int:
        """Return d j, counted from the end of the slowest worker's previous micro-batch."""
        return self._length * (i // self.sizes.workers) + self._durations[i % self.sizes.workers] * j

    def backward(self, i: int, j: int) -> int:
        """Return d (2S-j) - 1, counted from the same slot as `forward`."""
        duration = self._durations[i % self.sizes.workers]
        return self._length * (i // self.sizes.workers) + duration * (2 * self.sizes.stages - j) - 1

    @cached_property
    def lanes(self) -> Lanes:
        """The workers in turn; with speeds, the fastest first."""
        if not self.sizes.speeds:
            return Lanes(self.sizes.lanes)
        return Lanes(self.sizes.lanes, tuple(worker for _, worker in self._order), self._durations)

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        """Each worker's slots for a forward, and its number, the fastest first."""
        return sorted((ticks, worker) for worker, (ticks,) in enumerate(self.sizes.ticks.durations))

    @cached_property
    def _durations(self) -> tuple[int, ...]:
        return tuple(ticks for ticks, _ in self._order)

    @cached_property
    def _length(self) -> int:
        return 2 * self.sizes.stages * max(self._durations)
