"""Gradient accumulation's timeline."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from written import ORDERS, checked, written

from cdp_repro.schedule import Schedule


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(ORDERS), st.integers(1, 3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_accumulation_runs_one_worker_after_the_other_with_fresh_parameters(n, c, replicas, order, k):
    stages, turns = c * n, n * k
    schedule = Schedule.build("accumulation", n, stages, slot_order=order, replicas=replicas, accumulate=k)
    slots = written(schedule, 3)
    checked(schedule, slots, 3)
    for slot in slots:
        worker, phase = divmod(slot.number, 2 * stages)
        compute = [action for action in slot.actions if action.op.is_compute]
        assert {a.micro_batch // replicas for a in compute} == {worker} and len(compute) == replicas
        assert {a.stage for a in compute} == {min(phase, 2 * stages - 1 - phase)}
        assert {a.version for a in compute} == {worker // turns}
    assert schedule.slots_per_step == 2 * stages * turns
    assert len(slots) == 3 * schedule.slots_per_step
