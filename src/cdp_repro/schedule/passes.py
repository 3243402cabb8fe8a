"""Passes over compute: each takes a lazy stream of slots and returns it with one thing added.

None looks further ahead than one slot, so that a schedule of any length needs no more than the slots at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.placement import Placement


def order_slots(slots: Iterable[Slot], backward_first: bool) -> Iterator[Slot]:
    """Order the compute of each slot, which matters only where one device runs several workers.

    Forwards first is the paper's accounting: all activations of a slot are alive together. Backwards first
    frees memory before the forwards take it, which lowers the peak of equal stages from (N+1)/2 to N/2 times
    the activations of one micro-batch (for odd N: N/2 plus half a stage). Within each kind the order is that of
    the micro-batches, which is the order in which gradients are added.
    """
    for slot in slots:
        yield Slot(
            slot.number,
            tuple(sorted(slot.actions, key=lambda a: ((a.op is Op.FORWARD) is backward_first, a.micro_batch))),
        )


def place(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Give each forward and backward its rank, and the parameter version that the rule asks for."""
    for slot in slots:
        yield Slot(slot.number, tuple(_placed(action, placement) for action in slot.actions))


def _placed(action: Action, placement: Placement) -> Action:
    m, stage = action.micro_batch, action.stage
    assert m is not None
    return Action(action.op, stage, m, placement.mode.version_read(m, stage), rank=placement.rank_of(m, stage))


def with_next(slots: Iterable[Slot]) -> Iterator[tuple[Slot, Slot | None]]:
    """Yield each slot with the one that follows it, None after the last."""
    upcoming = iter(slots)
    slot = next(upcoming, None)
    while slot is not None:
        following = next(upcoming, None)
        yield slot, following
        slot = following
