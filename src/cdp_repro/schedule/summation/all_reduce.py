"""All ranks hold the stage and compute it at once: the library's all-reduce sums in an order of its own."""

from __future__ import annotations

from collections.abc import Callable

from cdp_repro.schedule.actions import Action
from cdp_repro.schedule.meaning import collective, with_sum
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import members_with, replace_backwards, update_before_reads
from cdp_repro.schedule.values import Value, gradient_sum


def sum_by_all_reduce(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """All-reduce the gradients of each stage as soon as all ranks have them; update before the first read."""
    slots = join_collectives(slots, schedule, stages, lambda total, _: total)
    return update_before_reads(slots, schedule, stages)


def join_collectives(
    slots: Slots, schedule: Schedule, stages: frozenset[int], result: Callable[[Value, int], Value]
) -> Slots:
    """Have each rank sum its own gradients of a step, and bring the sum to a collective after the slot's compute.

    `result` maps the total and a rank to the value that the collective makes there.
    """
    lanes = schedule.sizes.lanes

    def accumulated(backward: Action) -> tuple[Action]:
        m, stage = backward.micro_batch, backward.stage
        first = members_with(schedule, m)[m % lanes]
        return (with_sum(backward, gradient_sum(stage, range(first, m + 1, lanes))),)

    found = replace_backwards(slots, stages, accumulated)
    for actions in found:
        for action in [a for a in actions if a.op.gives_gradients and a.stage in stages]:
            (*_, own), stage, rank = action.writes, action.stage, action.rank
            members = members_with(schedule, action.micro_batch)
            if own.stop > members.stop - lanes:
                actions.append(collective(schedule, result(gradient_sum(stage, members), rank), rank))
    return found
