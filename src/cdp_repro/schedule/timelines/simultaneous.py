"""Data parallelism: all workers compute the same stage at once."""

from __future__ import annotations

from cdp_repro.schedule.timelines.timeline import Timeline


class Simultaneous(Timeline):
    """All workers run stage j forward in slot j and backward in slot 2S-1-j; k micro-batches one after the other.

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
        """2 S k."""
        return 2 * self.sizes.stages * (self.sizes.turns // self.sizes.workers)

    def forward(self, i: int, j: int) -> int:
        """Return j, after the micro-batches that the worker has computed before."""
        return 2 * self.sizes.stages * (i // self.sizes.workers) + j

    def backward(self, i: int, j: int) -> int:
        """Return 2S-1-j, after the same."""
        return 2 * self.sizes.stages * (i // self.sizes.workers + 1) - 1 - j
