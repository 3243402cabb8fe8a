"""Passes for data parallelism by collectives of the library, and what these cost.

All workers compute a stage in the same slot, so that one collective of all ranks can take the place of the messages
that `communication` derives: an all-reduce where all hold the stage; a broadcast by its owner, and a reduction to it,
where one does. The library adds gradients in an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdp_repro.schedule.actions import Action, Op, Payload, Slot
from cdp_repro.schedule.passes import before_use
from cdp_repro.schedule.placement import Placement


def add_all_reduces(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Reduce the gradients of each stage that all ranks hold, as soon as all have computed them."""
    for slot in slots:
        backwards = [a for a in slot.actions if a.op is Op.BACKWARD and a.stage not in placement.lent]
        parts = [_collective(Payload.TOTAL, action, placement) for action in backwards]
        yield Slot(slot.number, (*slot.actions, *parts))


def add_reductions_to_owners(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Reduce the gradients of each stage that is lent to its owner, which adds the result to its (empty) sum."""
    last = placement.mode.micro_batches - 1
    for slot in slots:
        backwards = [a for a in slot.actions if a.op is Op.BACKWARD and a.stage in placement.lent]
        adds = [
            Action(Op.ADD, action.stage, action.micro_batch, rank=placement.holders(action.stage).start)
            for action in backwards
            if action.micro_batch is not None and action.micro_batch % (last + 1) == last
        ]
        reductions = (_collective(Payload.GRADIENTS, action, placement) for action in backwards)
        yield Slot(slot.number, (*slot.actions, *reductions, *adds))


def add_broadcasts(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Broadcast the parameters of a stage that is lent, before the slot that computes with them."""
    return before_use(
        slots,
        lambda slot: (
            _collective(Payload.PARAMETERS, action, placement)
            for action in slot.actions
            if action.op.is_compute and action.stage in placement.lent
        ),
    )


def _collective(payload: Payload, compute: Action, placement: Placement) -> Action:
    """Return the part that the rank of a forward or backward takes in the collective that goes with it."""
    assert compute.micro_batch is not None
    versions = {Payload.PARAMETERS: compute.version, Payload.TOTAL: placement.mode.version_made(compute.micro_batch)}
    return Action(Op.COLLECTIVE, compute.stage, compute.micro_batch, versions.get(payload), payload, rank=compute.rank)


def awaits_result(collective: Action, owner: int) -> bool:
    """Whether the rank of a COLLECTIVE waits for its result: of a broadcast not the owner, of a reduction only that."""
    if collective.payload is Payload.TOTAL:
        return True
    return (collective.rank == owner) is (collective.payload is Payload.GRADIENTS)


def ring_bytes(collective: Action, size: int, placement: Placement) -> int:
    """Return what a rank sends to the next one in a ring for a COLLECTIVE of `size` bytes (Patarasuk and Yuan 2009).

    An all-reduce goes round twice with all but one of as many parts as there are ranks; a broadcast goes once from the
    owner to the rank before it, a reduction from the rank after the owner to the owner. What a library really sends
    from which rank is its own affair; the bytes of all ranks together are the same in a tree.
    """
    rank, ranks = collective.rank, placement.ranks
    if collective.payload is Payload.TOTAL:
        return 2 * (size - (size * (rank + 1) // ranks - size * rank // ranks))
    owner = placement.holders(collective.stage).start
    ends_at = owner if collective.payload is Payload.GRADIENTS else (owner - 1) % ranks
    return 0 if rank == ends_at else size


def ring_hops(collective: Action, ranks: int) -> int:
    """Return how many messages of a ring follow one another until all have the result of a COLLECTIVE."""
    return (2 if collective.payload is Payload.TOTAL else 1) * (ranks - 1)


def next_in_ring(rank: int, ranks: int) -> int:
    """Return the rank that `rank` sends to."""
    return (rank + 1) % ranks
