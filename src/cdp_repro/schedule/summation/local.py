"""One holder that computes the stage for all micro-batches: backwards add to its sum, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterable

from cdp_repro.schedule.actions import Action
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import members_with, replace_backwards, summed, update_at_once
from cdp_repro.schedule.values import gradient_sum


def sum_locally(slots: Slots, schedule: Schedule, stages: Iterable[int]) -> Slots:
    """Add each backward's gradients to the sum of its training step; update when it is complete."""

    def accumulated(backward: Action) -> tuple[Action]:
        m, stage = backward.micro_batch, backward.stage
        first = members_with(schedule, m)[0]
        before = gradient_sum(stage, range(first, m)) if m > first else None
        return (summed(backward, before, gradient_sum(stage, range(first, m + 1))),)

    return update_at_once(replace_backwards(slots, stages, accumulated), schedule, stages)
