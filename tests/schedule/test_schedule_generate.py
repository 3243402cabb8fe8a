"""A run, written out by the passes in their order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from written import schedules

from cdp_repro.schedule import Op, Schedule
from cdp_repro.schedule.generate import generate
from cdp_repro.schedule.passes.placing import compute


@given(schedule=schedules(), first=st.integers(0, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_other_passes_leave_each_compute_in_its_slot_and_order(schedule, first):
    placed, whole = compute(schedule, first, 2), generate(schedule, first, 2)
    names = [
        [(a.op, a.stage, a.micro_batch, a.version, a.rank) for a in slot.actions if a.op.is_compute] for slot in whole
    ]
    expected = [[(a.op, a.stage, a.micro_batch, a.version, a.rank) for a in actions] for actions in placed]
    assert names == expected + [[]] * (len(whole) - len(placed))


@given(schedule=schedules(), first=st.integers(0, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_receives_come_first_and_every_holder_updates_once_a_step(schedule, first):
    updates = Counter()
    for slot in generate(schedule, first, 2):
        receives = [action.op is Op.RECEIVE for action in slot.actions]
        assert receives == sorted(receives, reverse=True), "which never wait"
        updates.update((a.stage, a.version, a.rank) for a in slot.actions if a.op is Op.UPDATE)
    assert updates == Counter(
        (j, version, rank)
        for j in range(schedule.stages) for version in (first + 1, first + 2) for rank in schedule.placement.holders(j)
    )  # fmt: skip


def test_no_steps_no_actions():
    assert generate(Schedule.build("cdp_v2", 3, placement="replicated"), 2, 0) == []
