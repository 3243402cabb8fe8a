"""One micro-batch at a time: gradient accumulation on one device, naive model parallelism on several."""

from __future__ import annotations

from cdp_repro.schedule.timelines.timeline import Straight


class Sequential(Straight):
    """A micro-batch begins when the one before has finished, in slot 2S i. On D ranks the idle share is (D-1)/D.

    N = S = 2:

        slot      0  1  2  3  4  5  6  7
        worker 0  F0 F1 B1 B0
        worker 1              F0 F1 B1 B0
    """

    name = "sequential"
    placements = ("single_device", "pipeline")

    def begin(self, i: int) -> int:
        """Return 2S i."""
        return 2 * self.sizes.stages * i
