"""Forwards without backwards, for an evaluation: the ranks that a batch passes through, in order.

A batch is passed on as soon as possible. With D ranks and M batches a rank idles in D-1 of D-1+M slots:

    rank 0   0  1  2  3
    rank 1      0  1  2  3
    rank 2         0  1  2  3
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from cdp_repro.schedule.schedule import Schedule


@dataclass(frozen=True)
class Hop:
    """Consecutive stages that a batch passes through on one rank."""

    rank: int
    stages: tuple[int, ...]


def is_pipelined(schedule: Schedule) -> bool:
    """Whether forwards pass from rank to rank: a chain of stages, computed on their holders; no rank holds all."""
    if schedule.sizes.chosen_sources:
        return False
    holders = [schedule.placement.holders(stage) for stage in range(schedule.stages)]
    return not schedule.lent and not set(holders[0]).intersection(*holders[1:])


def path(schedule: Schedule, batch: int) -> list[Hop]:
    """Return the hops of a batch: those of the micro-batch of the same number. Replicas take turns."""
    by_rank = groupby(range(schedule.stages), lambda stage: schedule.placement.rank_of(batch, stage))
    return [Hop(rank, tuple(stages)) for rank, stages in by_rank]


def order(schedule: Schedule, rank: int, batches: int) -> list[tuple[int, int]]:
    """Return what a rank computes, in order, as (batch, number of the hop).

    Batch b is at hop h in slot b + h. A hop waits only for hops in earlier slots, and two ranks see the messages
    between them in the same order. So no rank waits for ever, and messages need no tag.
    """
    own = [(b, h) for b in range(batches) for h, hop in enumerate(path(schedule, b)) if hop.rank == rank]
    return sorted(own, key=sum)
