"""Collectives of all ranks, and what they cost as rings (Patarasuk and Yuan 2009).

An all-gather and a reduce-scatter go round once with all but one of as many parts as there are ranks, an all-reduce
twice. What a library really sends from which rank is its own affair.
"""

from __future__ import annotations

from cdp_repro.schedule.actions import Action
from cdp_repro.schedule.values import GRADIENTS, Value


def ring_bytes(collective: Action, size: int, ranks: int) -> int:
    """Return what a rank sends to the next one for a COLLECTIVE of `size` bytes."""
    rank = collective.rank
    return times_round(collective) * (size - (size * (rank + 1) // ranks - size * rank // ranks))


def ring_hops(collective: Action, ranks: int) -> int:
    """Return how many messages follow one another until all ranks have the result of a COLLECTIVE."""
    return times_round(collective) * (ranks - 1)


def times_round(collective: Action) -> int:
    """Return how often a COLLECTIVE goes round: twice if every rank gets the whole of a sum."""
    value = collective.value
    assert value is not None
    return 2 if value.kind == GRADIENTS and value.parts == 1 else 1


def next_in_ring(rank: int, ranks: int) -> int:
    """Return the rank that `rank` sends to."""
    return (rank + 1) % ranks


def collective_name(value: Value) -> tuple[object, ...]:
    """Return what names a collective for all ranks, given the value that it makes on one of them.

    Ranks gather parameters for micro-batches of their own, and scatter a sum to shards of their own.
    """
    if value.kind == GRADIENTS:
        return value.whole, value.parts
    return value.kind, value.stage, value.version
