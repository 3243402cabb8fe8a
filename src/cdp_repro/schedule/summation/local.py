"""One holder computes the stage for all micro-batches: backwards add to its sum, and nothing is sent."""

from __future__ import annotations

from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import replace_backwards, update_at_once
from cdp_repro.schedule.summation.relay import relayed_sum


def sum_locally(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Add each backward's gradients to the sum of its update; update when the sum is complete."""
    slots = replace_backwards(slots, stages, lambda backward: relayed_sum(backward, schedule))  # all on one rank
    return update_at_once(slots, schedule, stages)
