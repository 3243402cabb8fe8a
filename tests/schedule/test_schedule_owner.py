"""The owner of a lent stage adds what comes, a slot later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from summing import built, sent, sums_of
from written import CYCLIC, schedules

from cdp_repro.schedule import Op, Schedule
from cdp_repro.schedule.summation import strategy_of
from cdp_repro.schedule.summation.owner import sum_at_owner


@given(schedules(placements=("zero",)))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_gradients_go_to_the_owner_once_and_are_added_in_order(schedule):
    slots, steps = built(schedule, 3)
    M, rank_of = schedule.micro_batches, schedule.placement.rank_of
    for j in (j for j in range(schedule.stages) if strategy_of(schedule, j) is sum_at_owner):
        (owner,) = schedule.placement.holders(j)
        assert sums_of(slots, j, schedule) == {(t, owner): list(range(t * M, t * M + M)) for t in range(steps)}
        moved = sorted((value, a, b) for _, a, b, value in sent(slots) if value.startswith(f"g{j}["))
        assert moved == sorted(
            (f"g{j}[{m}:{m + 1}]", rank_of(m, j), owner) for m in range(steps * M) if rank_of(m, j) != owner
        )
        adds = [a for slot in slots for a in slot.actions if a.op is Op.ADD and a.stage == j]
        assert [a.rank for a in adds] == [owner] * (steps * (M - 1))
        assert [list(a.value.members) for a in adds] == [
            list(range(t * M, t * M + i + 1)) for t in range(steps) for i in range(1, M)
        ]


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
def test_what_has_been_sent_is_added_a_slot_later_unless_it_is_read_at_once(mode):
    schedule = Schedule.build(mode, 3, placement="zero")
    slots, _ = built(schedule, 4)
    made, reads = {}, {}
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.BACKWARD:
                made[action.stage, action.micro_batch] = slot.number
            if action.op.is_compute:
                reads.setdefault((action.stage, action.version), slot.number)
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.ADD and slot.number < len(slots) - 1:
                j, m = action.stage, action.value.stop - 1
                urgent = reads.get((j, m // 3 + 1)) == made[j, m] + 1
                assert slot.number == made[j, m] + (0 if urgent else 1)
