"""What the tests of the strategies share: the sum that each holder updates with, seen in the program's values."""

from __future__ import annotations

from symbolic import prove
from written import checked, written

from cdp_repro.schedule import Op, Schedule, Slot


def built(schedule: Schedule, steps: int, first_step: int = 0) -> tuple[list[Slot], int]:
    """A run that is checked, and proved by running it."""
    slots = written(schedule, steps, first_step)
    checked(schedule, slots, steps, first_step)
    prove(schedule, slots, steps, first_step)
    return slots, steps


def sums_of(slots: list[Slot], stage: int, schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """By training step and rank: the micro-batches in the sum that an update of a stage reads, in their order."""
    found = {}
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.UPDATE and action.stage == stage:
                (total,) = (value for value in action.reads if value.kind == "g")
                assert (action.version - 1, action.rank) not in found
                found[action.version - 1, action.rank] = list(total.members)
    return found


def sent(slots: list[Slot], kind: str = "g") -> list[tuple[int, int, int, str]]:
    """Each message with gradients: slot, source, destination, value."""
    return [
        (slot.number, a.rank, a.peer, str(a.value))
        for slot in slots for a in slot.actions if a.op is Op.SEND and a.value.kind == kind
    ]  # fmt: skip
