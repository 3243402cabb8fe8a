"""Collectives of all ranks, and what they cost as rings (Patarasuk and Yuan 2009).

With one part per rank, an all-gather or a reduce-scatter sends all parts but one round the ring once, an all-reduce
twice. A library may really send something else.
"""

from __future__ import annotations

from cdp_repro.schedule.actions import Action
from cdp_repro.schedule.values import Kind


def ring_bytes(collective: Action, size: int, ranks: int) -> int:
    """Return what a rank sends to the next one for a COLLECTIVE of `size` bytes."""
    rank = collective.rank
    return times_round(collective) * (size - (size * (rank + 1) // ranks - size * rank // ranks))


def ring_hops(collective: Action, ranks: int) -> int:
    """Return the number of consecutive messages until all ranks have the result of a COLLECTIVE."""
    return times_round(collective) * (ranks - 1)


def times_round(collective: Action) -> int:
    """Return how often a COLLECTIVE goes round the ring: twice if every rank gets the whole sum."""
    value = collective.value
    assert value is not None
    return 2 if value.kind == Kind.GRADIENTS and value.parts == 1 else 1


def next_in_ring(rank: int, ranks: int) -> int:
    """Return the rank that `rank` sends to."""
    return (rank + 1) % ranks
