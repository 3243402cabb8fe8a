"""The text form of actions round-trips; the schedule never imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdp_repro.schedule import Action, Op, Slot

small = st.integers(0, 10**9)
computes = st.builds(Action, st.sampled_from([Op.FORWARD, Op.BACKWARD]), small, small, st.none() | small)
state_changes = st.builds(
    lambda op, stage, v: Action(op, stage, version=v), st.sampled_from("UX").map(Op), small, small
)


@given(computes | state_changes)
def test_text_form_round_trips(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F2.m5@v1", Action(Op.FORWARD, 2, 5, 1)),
        ("B2.m5@v1", Action(Op.BACKWARD, 2, 5, 1)),
        ("F2.m5", Action(Op.FORWARD, 2, 5)),
        ("U2@v3", Action(Op.UPDATE, 2, version=3)),
        ("X12@v10", Action(Op.FREE, 12, version=10)),
    ],
)
def test_text_form_is_the_documented_one(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F", "F2", "F2@v1", "U2", "U2.m1@v1", "X2", "Q2.m5@v1", "F2.m5@v1 ", " F2.m5", "F2.m5@v", "F-1.m0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError):
        Action.parse(text)


def test_an_action_names_what_its_op_needs_and_nothing_else():
    for wrong in (
        lambda: Action(Op.FORWARD, 0),
        lambda: Action(Op.UPDATE, 0, micro_batch=1, version=1),
        lambda: Action(Op.FREE, 0),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_slot_prints_its_number_and_actions():
    assert str(Slot(7, (Action.parse("B0.m1@v0"), Action.parse("U0@v1")))) == "7: B0.m1@v0 U0@v1"


def test_the_schedule_leaves_torch_out():
    code = "import sys, cdp_repro.schedule; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
