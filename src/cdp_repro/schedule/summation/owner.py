"""One owner lends the stage to other ranks: they send it their gradients, and it adds them in order (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator

from cdp_repro.schedule.actions import Action, send
from cdp_repro.schedule.meaning import addition, with_sum
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import members_with, put_off, replace_backwards, update_at_once
from cdp_repro.schedule.values import gradient_sum


def sum_at_owner(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Send the gradients of each micro-batch to the owner, which adds them a slot later, after they have arrived."""

    def sent(backward: Action) -> Iterator[Action]:
        m, stage = backward.micro_batch, backward.stage
        own, first = gradient_sum(stage, (m,)), members_with(schedule, m)[0]
        (owner,) = schedule.placement.holders(stage)
        yield with_sum(backward, own)
        if backward.rank != owner:
            yield from send(own, backward.rank, owner)
        if m > first:
            yield addition(gradient_sum(stage, range(first, m + 1)), owner)

    return put_off(update_at_once(replace_backwards(slots, stages, sent), schedule, stages), schedule, stages)
