"""Workers that never wait for each other's gradients: each pushes when it is done (asynchronous SGD, SSP)."""

from __future__ import annotations

from functools import cached_property

from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.timelines.timeline import Straight


class Clocked(Straight):
    """A virtual clock says when each worker starts; a training step is one round, and each micro-batch is an update.

    A tick is 2S slots; a worker whose micro-batch takes d ticks takes d slots for each forward and backward.
    Micro-batches are numbered in the order of their pushes. N = S = 2, speeds = [1, 2]:

        slot      0  1  2  3  4  5  6  7
        worker 0  F0    F1       B1    B0
        worker 1  F0 F1 B1 B0 F0 F1 B1 B0

    If messages take time, a worker idles before each micro-batch for as long as its pull and its push take together.
    The slots have all compute later by the time of one message, so that it ends when its push arrives.
    """

    name = "clocked"
    has_exclusive_stages = False
    has_own_clocks = True
    placements = ("single_device", "parameter_server")

    @property
    def period(self) -> int:
        """2S slots for each tick of a round."""
        return 2 * self.sizes.stages * self.sizes.round.ticks

    def begin(self, i: int) -> int:
        """Return the slot from which the micro-batch ends when its push arrives."""
        turn = self.sizes.round.turns[i]
        return 2 * self.sizes.stages * (turn.end - turn.computing)

    @cached_property
    def lanes(self) -> Lanes:
        """The workers in the order in which they push."""
        turns = self.sizes.round.turns
        durations = tuple(turn.computing for turn in turns)
        return Lanes(self.sizes.lanes, tuple(turn.worker for turn in turns), durations)
