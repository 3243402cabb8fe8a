"""Passes over compute: each takes a lazy stream of slots and returns it with one thing added.

None looks further ahead than one slot, so that a schedule of any length needs no more than the slots at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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


def before_use(slots: Iterable[Slot], needed: Callable[[Slot], Iterable[Action]]) -> Iterator[Slot]:
    """Add what hands out the parameters that the compute of a slot needs, which `needed` returns, a slot earlier.

    There it goes before the compute, or after it where the version is made only then; before the first slot, into it.
    """
    is_first = True
    for slot, following in with_next(slots):
        just_made = {(action.stage, action.version) for action in slot.actions if action.op is Op.UPDATE}
        early: list[Action] = [*needed(slot)] if is_first else []
        late: list[Action] = []
        for end in needed(following) if following else ():
            (late if (end.stage, end.version) in just_made else early).append(end)
        is_first = False
        yield Slot(slot.number, (*early, *slot.actions, *late))


def with_next(slots: Iterable[Slot]) -> Iterator[tuple[Slot, Slot | None]]:
    """Yield each slot with the one that follows it, None after the last."""
    upcoming = iter(slots)
    slot = next(upcoming, None)
    while slot is not None:
        following = next(upcoming, None)
        yield slot, following
        slot = following
