"""The first pass: forwards and backwards in their slots and order, with what they read and write."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from written import schedules

from cdp_repro.schedule import Op, Schedule, Value
from cdp_repro.schedule.passes.placing import compute


@given(schedules())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_order_inside_a_slot(schedule):
    for actions in compute(schedule, 0, 3):
        ops = [action.op for action in actions]
        first_last = "BF" if schedule.spec.slot_order == "backward_first" else "FB"
        assert ops == sorted(ops, key=first_last.index)
        for op in (Op.FORWARD, Op.BACKWARD):
            batches = [action.micro_batch for action in actions if action.op is op]
            assert batches == sorted(batches)


@given(schedules())
@settings(deadline=None, max_examples=50, derandomize=True)
def test_gradients_of_a_stage_are_ready_in_the_order_of_the_micro_batches(schedule):
    ready = defaultdict(list)
    for actions in compute(schedule, 0, 3):
        for action in actions:
            if action.op is Op.BACKWARD:
                ready[action.stage].append(action.micro_batch)
    assert ready == {j: list(range(3 * schedule.micro_batches)) for j in range(schedule.stages)}


@given(schedules(), st.integers(0, 3))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_both_ends_of_every_stage_are_named(schedule, first):
    last = schedule.stages - 1
    for actions in compute(schedule, first, 2):
        for action in actions:
            j, m, v = action.stage, action.micro_batch, action.version
            assert action.rank == schedule.placement.rank_of(m, j)
            assert v == schedule.rule.version(m, j)
            whole = action.rank in schedule.placement.holders(j) and not schedule.placement.is_sharded
            lent = Value("pf" if action.op is Op.FORWARD else "pb", j, m, v)
            assert (Value("p", j, v) if whole else lent) in action.reads
            if action.op is Op.FORWARD:
                out = Value("d", j, m) if j == last else Value("x", j + 1, m)
                assert action.writes == (Value("s", j, m), out, Value("b", j, m % schedule.sizes.lanes))
                assert (Value("x", j, m) in action.reads) == (j > 0)
            else:
                assert action.writes == ((Value("d", j - 1, m),) if j else ())
                assert {Value("s", j, m), Value("d", j, m)} <= {*action.reads}


def test_no_steps_no_slots():
    for mode in ("dp", "cdp_v1", "cdp_v2", "accumulation"):
        assert compute(Schedule.build(mode, 3), 0, 0) == []
