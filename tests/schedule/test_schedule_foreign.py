"""Timelines, rules and placements of others that give no numbers to make a program from are refused with the reason."""

from __future__ import annotations

import pytest

from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.foreign import ForeignError
from cdp_repro.schedule.modes import add_mode
from cdp_repro.schedule.placements import Placement, add_placement
from cdp_repro.schedule.rules import Fresh
from cdp_repro.schedule.timelines import Sequential, add_timeline

pytestmark = pytest.mark.usefixtures("registries_restored")


def place(stages=2, accumulate=1, **methods):
    """Build `dp` with the turns of micro-batches one after the other, on a placement with these methods."""
    add_timeline(type("Turns", (Sequential,), {"name": "turns", "placements": None}))
    add_mode("in_turns", "turns", Fresh)
    add_placement(type("Place", (Placement,), {"name": "place", **methods}))
    return Program(Schedule.build("in_turns", 2, stages, "place", accumulate=accumulate))


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ({"holders": lambda _, j: range(0)}, r"Place: holders\(0\) is empty: give at least one rank"),
        ({"holders": lambda _, j: None}, r"Place: TypeError: 'NoneType' object is not iterable"),
        ({"holders": lambda _, j: (0.5,)}, r"Place: a rank of holders\(0\) is 0\.5: give a whole number, at least 0"),
        (
            {"holders": lambda _, j: range(1), "rank_of": lambda _, m, j: m / 2},
            r"Place: rank_of\(0, 0\) is 0\.0: give a whole number",
        ),
        (
            {"holders": lambda _, j: range(2), "rank_of": lambda _, m, j: -1},
            r"Place: rank_of\(0, 0\) is -1: give a whole number, at least 0",
        ),
        (
            {"holders": lambda _, j: range(3), "rank_of": lambda _, m, j: 0},
            r"the ranks \[0, 1, 2\] hold stage 0, but \[0\] compute it: several holders take turns",
        ),
        (
            {"holders": lambda _, j: range(2), "rank_of": lambda _, m, j: 1 + m % 2},
            r"the ranks \[0, 1\] hold stage 0, but \[1, 2\] compute it",
        ),
        (
            {"holders": lambda _, j: range(1), "rank_of": lambda _, m, j: 1 + m % 3},
            r"rank_of\(2, 0\) is 3, which neither holds stage 0 nor computes .* repeat after 2 micro-batches",
        ),
        ({"holders": lambda _, j: range(j + 1, j + 2)}, r"the ranks \[0\] neither hold nor compute a stage: number"),
        ({"holders": lambda _, j: range(2 * j, 2 * j + 1)}, r"the ranks \[1\] neither hold nor compute a stage"),
    ],
)
def test_placements(methods, told):
    with pytest.raises(ForeignError, match=told):
        place(**methods)


@pytest.mark.parametrize(
    "methods",
    [
        {"holders": lambda _, j: range(j, j + 1)},
        {"holders": lambda _, j: (1, 0)},
        {"holders": lambda _, j: range(2, 3), "rank_of": lambda _, m, j: m % 2},
    ],
)
def test_placements_that_work(methods):
    assert place(**methods).slots(3)


def test_the_rank_that_nobody_knows_is_named_among_those_that_borrow_late():
    """Two micro-batches begin at once; the third has rank 3, unknown, and the fourth rank 2, which holds stage 2."""
    late = {"holders": lambda _, j: range(j, j + 1), "rank_of": lambda _, m, j: (0, 1, 3, 2)[m % 4]}
    with pytest.raises(ForeignError, match=r"rank_of\(2, 0\) is 3, which neither holds stage 0"):
        place(stages=3, **late)


def test_a_rank_may_borrow_a_stage_late_if_others_do_so_at_once_and_it_has_work_of_its_own():
    methods = {"holders": lambda _, j: range(j, j + 1), "rank_of": lambda _, m, j: (j + m) % 3}
    assert place(stages=3, accumulate=3, **methods).slots(4)  # six micro-batches a step, of which two begin at once


def time(**methods):
    add_timeline(type("Own", (Sequential,), {"name": "own", **methods}))
    add_mode("timed", "own", Fresh)
    return Schedule.build("timed", 2, 2)


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ({"period": 8.0}, r"Own: period is 8\.0: give a whole number, at least 1"),
        ({"period": -4}, r"Own: period is -4: give a whole number, at least 1"),
        ({"forward": lambda _, i, j: None}, r"Own: forward\(0, 0\) is None: give a whole number, at least 0"),
        ({"backward": lambda _, i, j: 1.5}, r"Own: backward\(0, 0\) is 1\.5"),
        ({"forward": lambda _, i: 0}, r"Own: TypeError: "),
        (
            {"forward": lambda _, i, j: 4 * i + 1 - j},
            r"Own: forward\(0, 1\) is 0, before forward\(0, 0\), 1: it makes its input",
        ),
        (
            {"backward": lambda _, i, j: 4 * i + 2 + j},
            r"Own: backward\(0, 0\) is 2, before backward\(0, 1\), 3: it makes its gradient",
        ),
        (
            {"backward": lambda _, i, j: 4 * i + 1 - j},
            r"Own: backward\(0, 1\) is 0, before forward\(0, 1\), 1: it saves what it needs",
        ),
        (
            {"backward_weights": lambda _, i, j: 4 * i},
            r"Own: backward_weights\(0, 0\) is 0, before backward\(0, 0\), 3: it makes what it needs",
        ),
        (
            {"forward": lambda _, i, j: 4 - 4 * i + j, "backward": lambda _, i, j: 7 - 4 * i - j},
            r"Own: backward_weights\(1, 0\) is 3, before backward_weights\(0, 0\), 7: gradients are added in the order",
        ),
        (
            {"period": 3},
            r"Own: backward_weights\(1, 0\) is 7, after backward_weights\(0, 0\) of the next training step, 6: "
            "give a period of at least 4",
        ),
    ],
)
def test_timelines(methods, told):
    with pytest.raises(ForeignError, match=told):
        time(**methods)


@pytest.mark.parametrize("staleness", [1.0, None, "1", -1, True])
def test_rules(staleness):
    late = type("Late", (Fresh,), {"staleness": lambda *_: staleness})
    add_mode("late", "cyclic", late)
    with pytest.raises(ForeignError, match=rf"Late: staleness\(0, 0\) is {staleness!r}: give a whole number"):
        Schedule.build("late", 2, 2)


def test_a_rule_is_made_from_the_sizes():
    with pytest.raises(ValueError, match="the rule of a mode is 3: give what makes it from the sizes"):
        add_mode("three", "cyclic", 3)
