"""Passes for data parallelism by collectives of the library, and what these cost.

All workers compute a stage in the same slot, so that one collective of all ranks can take the place of the messages
that `communication` derives: an all-reduce where all hold the stage; where each holds a shard of it, an all-gather of
its parameters and a reduce-scatter of its gradients. The library adds gradients in an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdp_repro.schedule.actions import Action, Op, Payload, Slot, result_of
from cdp_repro.schedule.passes import before_use
from cdp_repro.schedule.placement import Placement


def add_all_reduces(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Reduce the gradients of each stage that all ranks hold, as soon as all have computed them."""
    for slot in slots:
        backwards = [a for a in slot.actions if a.op is Op.BACKWARD and a.stage not in placement.lent]
        parts = [_collective(Payload.TOTAL, action, placement) for action in backwards]
        yield Slot(slot.number, (*slot.actions, *parts))


def add_reduce_scatters(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Reduce the gradients of each stage that is sharded to its shards; each rank adds its own to its (empty) sum."""
    for slot in slots:
        backwards = [a for a in slot.actions if a.op is Op.BACKWARD and a.stage in placement.lent]
        parts = [_collective(Payload.GRADIENTS, action, placement) for action in backwards]
        results = [result_of(part, placement.mode.micro_batches) for part in parts]
        adds = [
            Action(Op.ADD, part.stage, m, rank=part.rank) for part, (_, _, m, *_) in zip(parts, results, strict=True)
        ]
        yield Slot(slot.number, (*slot.actions, *parts, *adds))


def add_all_gathers(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Gather the parameters of a stage that is sharded on all ranks, before the slot that computes with them."""
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


def ring_bytes(collective: Action, size: int, ranks: int) -> int:
    """Return what a rank sends to the next one in a ring for a COLLECTIVE of `size` bytes (Patarasuk and Yuan 2009).

    An all-gather and a reduce-scatter go round once with all but one of as many parts as there are ranks, an all-reduce
    twice. What a library really sends from which rank is its own affair.
    """
    rank = collective.rank
    return _times_round(collective) * (size - (size * (rank + 1) // ranks - size * rank // ranks))


def ring_hops(collective: Action, ranks: int) -> int:
    """Return how many messages of a ring follow one another until all have the result of a COLLECTIVE."""
    return _times_round(collective) * (ranks - 1)


def _times_round(collective: Action) -> int:
    return 2 if collective.payload is Payload.TOTAL else 1


def next_in_ring(rank: int, ranks: int) -> int:
    """Return the rank that `rank` sends to."""
    return (rank + 1) % ranks
