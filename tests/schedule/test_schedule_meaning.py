"""What each kind of action must read and write: one thing less, more or other is told of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import schedules, written

from cdp_repro.schedule import Action, Schedule, Value
from cdp_repro.schedule.meaning import fault_of

SINGLE = Schedule.build("cdp_v2", 2, accumulate=2)
ZERO = Schedule.build("cdp_v2", 2, placement="zero")
SHARDED = Schedule.build("dp", 2, placement="zero", collectives=True)
STRANGE = Value("x", 9, 9)


@given(schedule=schedules(workers=3, accumulate=2))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_action_of_a_program_has_a_fault(schedule):
    for slot in written(schedule, 2):
        assert [fault_of(action, schedule) for action in slot.actions] == [None] * len(slot.actions)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "A g1[0:2]: g1[0:1]#1/2! g1[0:1]#2/3! g1[1:2]! -> g1[0:2]",
            "it must read g1[0:1]#1/3, g1[0:1]#2/3, g1[0:1]#3/3, g1[1:2], not g1[0:1]#1/2, g1[0:1]#2/3, g1[1:2]",
        ),
        (
            "A g1[0:2]: g1[0:1]#1/2! g1[0:1]#1/2! g1[1:2]! -> g1[0:2]",
            "it must read g1[0:1]#1/2, g1[0:1]#2/2, g1[1:2], not g1[0:1]#1/2, g1[0:1]#1/2, g1[1:2]",
        ),
        ("A g1[0:2]: g1[0:1]! g1[0:1]#1/2! g1[1:2]! -> g1[0:2]", "it must read g1[0:1]#1/2, g1[0:1]#2/2, g1[1:2]"),
        ("A g1[0:2]: g1[0:1]#1/999999999! g1[1:2]! -> g1[0:2]", "g1[0:1]#3/3, g1[1:2], not g1[0:1]#1/999999999"),
        ("S g1[0:1]#1/2>1: g1[0:1]#1/2! ->", "it must read g1[0:1]"),
    ],
)
def test_parts_are_sent_from_the_whole_and_added_together(text, fault):
    """Else a buffer would be read that nobody has filled."""
    assert fault in fault_of(Action.parse(text), Schedule.build("cdp_v2", 2, placement="replicated"))


@given(schedule=schedules(workers=3, accumulate=2), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_value_too_few_or_too_many_is_a_fault(schedule, data):
    actions = [action for slot in written(schedule, 2) for action in slot.actions]
    action = data.draw(st.sampled_from(actions))
    for name in ("reads", "writes"):
        values = getattr(action, name)
        if values:
            gone = data.draw(st.sampled_from(values))
            less = tuple(v for v in values if v != gone)
            kept = tuple(v for v in action.frees if v in (less if name == "reads" else action.reads))
            assert fault_of(action._replace(**{name: less, "frees": kept}), schedule)
        assert fault_of(action._replace(**{name: (*values, STRANGE)}), schedule)
    assert (
        fault_of(action._replace(frees=(*action.frees, STRANGE)), schedule)
        == f"it frees {STRANGE}, which it does not read"
    )


@pytest.mark.parametrize(
    ("schedule", "text", "said"),
    [
        (SINGLE, "F7.m0@v0: x7.m0 p7@v0 b7.w0 -> s7.m0 x8.m0 b7.w0", "there are only 2 stages"),
        (SINGLE, "F1.m4@v0: x1.m4 p1@v0 b1.w0 -> s1.m4 d1.m4 b1.w0", "its rule asks for version 1"),
        (SINGLE, "F1.m0@v0: x1.m0 p1@v0 b1.w1 -> s1.m0 d1.m0 b1.w1",
         "it must read x1.m0, p1@v0, b1.w0, not x1.m0, p1@v0, b1.w1"),
        (SINGLE, "B1.m1@v0: s1.m1 d1.m1 p1@v0 -> d0.m1", "it must write one sum, of which micro-batch 1 is the last"),
        (SINGLE, "B1.m2@v0: s1.m2 d1.m2 p1@v0 g1[0:1] -> d0.m2 g1[0:3]",
         "it must read s1.m2, d1.m2, p1@v0, g1[0:2], not s1.m2, d1.m2, p1@v0, g1[0:1]"),
        (SINGLE, "B1.m2@v0: s1.m2 d1.m2 p1@v0 g1[0:2] -> d0.m2 g1[0:4]", "of which micro-batch 2 is the last"),
        (SINGLE, "B1.m4@v1: s1.m4 d1.m4 p1@v1 g1[2:4] -> d0.m4 g1[2:5]", "g1[2:5] would mix training steps"),
        (SINGLE, "A g1[0:3]: g1[0:1] g1[2:3] -> g1[0:3]",
         "it must read g1[0:2], g1[2:3], not g1[0:1], g1[2:3]: a sum is of micro-batches in their order"),
        (SINGLE, "A g1[0:3]: g1[0:1] g1[1:3] -> g1[0:3]", "it must read g1[0:2], g1[2:3], not g1[0:1], g1[1:3]: "),
        (SINGLE, "A g1[0:2]: g1[0:1] g1[1:2]#1/2 -> g1[0:2]", "it must read g1[0:1], g1[1:2]#1/2, g1[1:2]#2/2, not"),
        (SINGLE, "A g1[0:2]: g1[0:1] g0[1:2] -> g1[0:2]", "it must read g1[0:1], g1[1:2], not g1[0:1], g0[1:2]"),
        (SINGLE, "A g1[0:3]: g1[0:1] g1[1:2] -> g1[0:3]", "it must read g1[0:2], g1[2:3], not g1[0:1], g1[1:2]"),
        (SINGLE, "A g1[0:1]: g1[0:1] -> g1[0:1]", "it must make a sum of several micro-batches in their order"),
        (SINGLE, "A g1[3:5]: g1[3:4] g1[4:5] -> g1[3:5]", "g1[3:5] would mix training steps"),
        (SINGLE, "U1@v2: p1@v1 g1[0:4] -> p1@v2", "it must read p1@v1, g1[4:8], not p1@v1, g1[0:4]"),
        (ZERO, "U1@v1: p1@v0 g1[0:2] -> p1@v1", "rank 0 does not hold stage 1"),
        (ZERO, "S pf0.m1@v0>1: p0@v1 ->", "it must read p0@v0"),
        (ZERO, "S g0[0:1]#1/2>1: g0[1:2] ->", "it must read g0[0:1]"),
        (ZERO, "R x1.m0<1: x1.m0 -> x1.m0", "it must read nothing, not x1.m0"),
        (SHARDED, "C pf0.m0@v0: p0@v0#2/2 -> pf0.m0@v0", "not p0@v0#2/2: a rank brings its shard of a version"),
        (SHARDED, "C g0[0:2]#1/2: p0@v0#1/2 -> g0[0:2]#1/2", "it must read g0[0:1], not p0@v0#1/2: a rank brings"),
        (SHARDED, "C g0[0:999999999]: g0[0:1] -> g0[0:999999999]", "g0[0:999999999] would mix training steps"),
        (SHARDED, "C g0[0:1]: g0[0:1] -> g0[0:1]", "it must make the sum of an update, or lent parameters"),
        (SHARDED, "U0@v1: p0@v0 g0[0:2] -> p0@v1", "it must read p0@v0#1/2, g0[0:2]#1/2"),
    ],
)  # fmt: skip
def test_faults_say_what_is_wrong(schedule, text, said):
    fault = fault_of(Action.parse(text, 0), schedule)
    assert fault is not None and said in fault


def test_collectives_are_refused_where_the_schedule_has_none():
    """They add in an order of their own, which the same seed would not repeat."""
    action = Action.parse("C g0[0:2]: g0[0:1]! -> g0[0:2]", 0)
    plain, collective = (Schedule.build("dp", 2, placement="replicated", collectives=each) for each in (False, True))
    assert fault_of(action, collective) is None
    assert "the schedule has collectives = false" in str(fault_of(action, plain))


def test_a_compute_on_another_rank_is_a_fault():
    action = Action.parse("F0.m0@v0: p0@v0 b0.w0 -> s0.m0 x1.m0 b0.w0", 1)
    assert fault_of(action, ZERO) == "it is on rank 1; the placement puts it on rank 0"
