"""Lanes: the row of every picture that a micro-batch is in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cdp_repro.schedule.actions import Action, Op, Slot


@dataclass(frozen=True)
class Lanes:
    """`number` lanes. They take micro-batches in turn, unless `order` gives another order."""

    number: int
    order: tuple[int, ...] = ()
    """The lane of each micro-batch of a training step, the same in every step."""
    durations: tuple[int, ...] = ()
    """The slots that each forward or backward of a micro-batch takes, likewise; 1 unless given."""
    each: int = 1
    """Lanes of each worker: R L."""

    @property
    def names(self) -> list[str]:
        """What the lanes are called: by their workers, if each has one."""
        return [f"{'worker' if self.each == 1 else 'lane'} {lane}" for lane in range(self.number)]

    def worker_of(self, micro_batch: int) -> int:
        """Return the worker of a micro-batch."""
        return self.lane_of(micro_batch) // self.each

    def lane_of(self, micro_batch: int) -> int:
        """Return the lane of a micro-batch."""
        return self.order[micro_batch % len(self.order)] if self.order else micro_batch % self.number

    def duration(self, micro_batch: int) -> int:
        """Return the slots that a forward or backward of a micro-batch takes."""
        return self.durations[micro_batch % len(self.durations)] if self.durations else 1

    def busy(self, slot: int, action: Action) -> range:
        """Return the slots that a forward or backward takes; `slot` is where the program has it.

        With d slots, a forward is in the first of them, and a backward in the last.
        """
        duration = self.duration(action.micro_batch)
        first = slot if action.op is Op.FORWARD else slot - duration + 1
        return range(first, first + duration)

    def computing(self, slots: Iterable[Slot]) -> set[tuple[int, int]]:
        """Return (rank, slot) of all slots in which a rank computes."""
        computes = ((slot.number, action) for slot in slots for action in slot.actions if action.op.is_compute)
        return {(action.rank, taken) for number, action in computes for taken in self.busy(number, action)}
