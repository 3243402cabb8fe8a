"""Names of values: their text form round-trips, and a shift moves them whole training steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import Value
from cdp_repro.schedule.values import buffers, gradient_sum, micro_batch_value, parameters

small = st.integers(0, 10**6)
names = st.one_of(
    st.builds(micro_batch_value, st.sampled_from("xsdkh"), small, small),
    st.builds(parameters, small, small),
    st.builds(buffers, small, small),
    st.builds(lambda kind, j, m, v: Value(kind, j, m, v), st.sampled_from(["pf", "pb"]), small, small, small),
    st.builds(lambda j, first, n, stride: gradient_sum(j, range(first, first + n * stride, stride)),
              small, small, st.integers(1, 9), st.integers(1, 9)),
)  # fmt: skip
values = st.one_of(
    names, st.builds(lambda v, part, more: v.divided(part, part + more), names, st.integers(1, 9), st.integers(1, 9))
)


@given(values)
@settings(derandomize=True)
def test_text_form_round_trips(value):
    assert Value.parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x2.m5", Value("x", 2, 5)),
        ("s2.m5", Value("s", 2, 5)),
        ("d2.m5", Value("d", 2, 5)),
        ("k2.m5", Value("k", 2, 5)),
        ("h2.m5", Value("h", 2, 5)),
        ("g2[4:6]", Value("g", 2, 4, stop=6)),
        ("g2[1:6:4]", Value("g", 2, 1, stop=6, stride=4)),
        ("p2@v3", Value("p", 2, 3)),
        ("pf2.m5@v3", Value("pf", 2, 5, 3)),
        ("pb2.m5@v3", Value("pb", 2, 5, 3)),
        ("b2.w1", Value("b", 2, 1)),
        ("g2[4:6]#1/4", Value("g", 2, 4, stop=6, part=1, parts=4)),
        ("p2@v3#4/4", Value("p", 2, 3, part=4, parts=4)),
    ],
)
def test_text_form_is_the_documented_one(text, value):
    assert str(value) == text
    assert Value.parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "x2", "x.m5", "y2.m5", "x2.m5@v1", "x2.w5", "x2[4:6]", "s2", "d2.m", "g2", "g2.m4", "g2[4]",
        "g2[6:4]", "g2[4:4]",
        "g2[4:6]@v1", "p2", "p2.m5", "p2.m5@v3", "p2@v", "pf2.m5", "pf2@v3", "b2.m1", "b2", "x-1.m0",
        "x2.m5 ", " x2.m5",
        "X2.m5", "g2[4:6]#4", "g2[4:6]#5/4", "g2[4:6]#0/4", "g2[4:6]#1/1", "g2[4:6]#1/0", "g2[-1:2]", "x2.m5#/2",
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(text):
    with pytest.raises(ValueError):
        Value.parse(text)


def test_the_members_of_a_sum_are_its_micro_batches_in_order():
    assert list(Value.parse("g0[4:7]").members) == [4, 5, 6]
    assert list(Value.parse("g0[1:10:4]").members) == [1, 5, 9]
    assert gradient_sum(0, [7]) == Value.parse("g0[7:8]")
    assert gradient_sum(0, range(1, 13, 4)) == Value.parse("g0[1:10:4]")


@given(values, st.integers(0, 9), st.integers(0, 9), st.integers(1, 20))
@settings(derandomize=True)
def test_a_shift_moves_micro_batches_and_versions_and_adds_up(value, steps, more, micro_batches):
    later = value.shifted(steps * micro_batches, steps)
    assert later.shifted(more * micro_batches, more) == value.shifted((steps + more) * micro_batches, steps + more)
    ahead = {"p": steps, "b": 0}.get(value.kind, steps * micro_batches)
    assert (later.kind, later.stage, later.number) == (value.kind, value.stage, value.number + ahead)
    assert later.version == value.version + (steps if value.kind in ("pf", "pb") else 0)
    if value.kind == "g":
        assert list(later.members) == [m + ahead for m in value.members]
    if value.kind in ("p", "g", "b"):
        assert (later.part, later.parts) == (value.part, value.parts)


def test_a_value_is_the_whole_of_its_parts():
    whole = Value.parse("g2[4:6]")
    assert whole.divided(0, 1) == whole == whole.whole == whole.divided(2, 4).whole
    assert str(whole.divided(2, 4)) == "g2[4:6]#2/4"
