"""Each rank holds a shard of the stage: the library's reduce-scatter gives each rank its shard of the sum."""

from __future__ import annotations

from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.all_reduce import join_collectives
from cdp_repro.schedule.summation.common import put_off, update_at_once


def sum_by_reduce_scatter(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Reduce-scatter the gradients of each stage as soon as all ranks have them; update a slot later."""
    slots = join_collectives(slots, schedule, stages, lambda total, rank: total.divided(rank + 1, schedule.ranks))
    return put_off(update_at_once(slots, schedule, stages), schedule, stages)
