"""The text form of actions round-trips, and says all that they mean; the schedule never imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import schedules, written

from cdp_repro.schedule import Action, Op, Slot, Value
from cdp_repro.schedule.actions import send
from cdp_repro.schedule.values import parameters

DOCUMENTED = [
    "F2.m5@v1: x2.m5! p2@v1 b2.w1! -> s2.m5 x3.m5 b2.w1",
    "B2.m5@v1: s2.m5! d2.m5! p2@v1! -> d1.m5 g2[5:6]",
    "A g2[4:6]: g2[4:5]! g2[5:6]! -> g2[4:6]",
    "U2@v3: p2@v2! g2[8:12]! -> p2@v3",
    "S x3.m5>3: x3.m5! ->",
    "R x3.m5<0: -> x3.m5",
    "C g2[4:8]: g2[5:6]! -> g2[4:8]",
    "S g2[5:6]#1/4>1: g2[5:6] ->",
    "R g2[5:6]#4/4<1: -> g2[5:6]#4/4",
    "A g2[4:6]: g2[4:5]! g2[5:6]#1/2! g2[5:6]#2/2! -> g2[4:6]",
    "C pf2.m5@v3: p2@v3#2/2 -> pf2.m5@v3",
    "U12@v10: p12@v9#2/2! g12[18:20]#2/2! -> p12@v10#2/2",
]


@given(schedule=schedules(), steps=st.integers(1, 2))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_action_of_every_program_is_read_back(schedule, steps):
    for slot in written(schedule, steps):
        for action in slot.actions:
            assert Action.parse(str(action), action.rank) == action


@pytest.mark.parametrize("text", DOCUMENTED)
def test_text_form_is_the_documented_one(text):
    assert str(Action.parse(text, 3)) == text
    assert Action.parse(text, 3).rank == 3


def test_an_action_says_everything_by_itself():
    x, s = Value("x", 2, 5), Value("s", 2, 5)
    p, b = parameters(2, 1), Value("b", 2, 1)
    forward = Action(
        Op.FORWARD, 0, 2, 5, 1, reads=(x, p, b), writes=(s, Value("x", 3, 5), b), frees=(x, b)
    )  # fmt: skip
    assert str(forward) == DOCUMENTED[0]
    assert Action.parse(DOCUMENTED[0]) == forward
    assert Action.parse(DOCUMENTED[3]) == Action(
        Op.UPDATE, 0, 2, version=3, reads=(parameters(2, 2), Value("g", 2, 8, stop=12)), writes=(parameters(2, 3),),
        frees=(parameters(2, 2), Value("g", 2, 8, stop=12)),
    )  # fmt: skip
    moved = Value("x", 3, 5)
    assert Action.parse(DOCUMENTED[4], 0)._replace(frees=()) == send(moved, 0, 3)[0]
    assert Action.parse(DOCUMENTED[5], 3) == send(moved, 0, 3)[1]


@pytest.mark.parametrize(
    "text",
    [
        "", "F", "F2", "F2@v1", "F2.m5", "F2.m5@v1", "F2.m5@v1:", "F2.m5@v1: ->x", "F2@v1: ->", "F2.m5@v: ->",
        "F-1.m0@v0: ->", "Q2.m5@v1: ->", "U2: ->", "U2.m1@v1: ->", "U2@v: ->", "S x3.m5: x3.m5 ->",
        "S x3.m5<1: x3.m5 ->",
        "R x3.m5>1: -> x3.m5", "S>1: x3.m5 ->", "A: g0[0:1] g0[1:2] ->", "A2@v1: ->", "C2.m5@v1: ->", "C g2[4:8]>1: ->",
        "A g2[4:6]>1: ->", "S x3.m5>1: y3.m5 ->", "F2.m5@v1: x2.m5!! x ->", "X2@v1: ->", "B2.m5 -> g2[5:6]",
        "S x3.m5>: x3.m5 ->", "S g2[5:6]#5/4>1: g2[5:6] ->", "F2.m5@v1#4: ->",
    ],
)  # fmt: skip
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError):
        Action.parse(text)


@pytest.mark.parametrize("text", ["F2.m5@v1", "B12.m0@v3"])
def test_labels_of_computes_are_read_back(text):
    """Files for drawings keep only these."""
    assert Action.parse(f"{text}: ->").label == text


@given(schedule=schedules(workers=3), steps=st.integers(0, 3), more=st.integers(0, 3))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_shift_moves_all_that_an_action_names(schedule, steps, more):
    M = schedule.micro_batches
    for slot in written(schedule, 1):
        for action in slot.actions:
            later = action.shifted(steps * M, steps)
            assert later.shifted(more * M, more) == action.shifted((steps + more) * M, steps + more)
            assert (later.op, later.rank, later.stage, later.peer) == (
                action.op,
                action.rank,
                action.stage,
                action.peer,
            )
            for name in ("reads", "writes", "frees"):
                assert getattr(later, name) == tuple(v.shifted(steps * M, steps) for v in getattr(action, name))
            if action.op.is_compute:
                assert (later.micro_batch, later.version) == (action.micro_batch + steps * M, action.version + steps)
            turned = action.shifted(steps * M, steps, lambda rank: rank + 7)
            assert (turned.rank, turned.peer) == (action.rank + 7, action.peer + 7 if action.peer >= 0 else -1)


def test_the_parts_of_a_split_backward_take_as_long_as_the_whole():
    """Each is one of the two products of a linear layer."""
    whole, *parts = (op.backward_share for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHTS))
    assert parts == [whole / 2] * 2
    assert {op for op in Op if op.backward_share} == {Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHTS}


def test_slot_prints_its_number_and_actions():
    texts = ("B0.m1@v0: s0.m1! d0.m1! p0@v0 -> g0[1:2]", "U0@v1: p0@v0! g0[0:2]! -> p0@v1")
    assert str(Slot(7, tuple(map(Action.parse, texts)))) == "7: B0.m1@v0 U0@v1"


def test_the_schedule_leaves_torch_out():
    code = (
        "import sys, cdp_repro.schedule, cdp_repro.trace, cdp_repro.predict.simulate; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
