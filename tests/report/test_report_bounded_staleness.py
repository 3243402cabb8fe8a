"""Waiting, staleness and regret of workers on clocks of their own, against what is known of them."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from cdp_repro.report.bounded_staleness import (
    BOUNDS,
    LIPSCHITZ,
    PUSHES,
    SPEEDS,
    WIDTH,
    draw_regret,
    measured,
    regret_caption,
    regret_table,
)


def test_regret_stays_below_its_bound_after_any_number_of_pushes():
    for each in measured():
        assert len(each.regret) == PUSHES.bit_length()
        assert each.widest**2 / 2 <= WIDTH**2  # else the bound would not apply
        for exponent, regret in enumerate(each.regret):
            assert 0 <= regret <= each.bound(2**exponent)


@pytest.mark.parametrize(("jitter", "said"), [(0, "of their own that push"), (1, "of their own, and jitter, that")])
def test_the_caption_says_whether_there_is_jitter(jitter, said, monkeypatch):
    monkeypatch.setattr("cdp_repro.report.bounded_staleness.JITTER", jitter)
    assert said in regret_caption()


def test_the_bound_is_that_of_the_paper():
    (s_2,) = (each for each in measured() if each.slack == 2)
    assert s_2.bound(100) == pytest.approx(4 * WIDTH * LIPSCHITZ * math.sqrt(2 * 3 * 4 / 100))


def test_waiting_is_what_speeds_and_bounds_say():
    waiting = {each.slack: each.waiting for each in measured()}
    assert [*waiting] == [*BOUNDS] and waiting[None] == 0
    # bounded, the worker of twice the speed makes as many pushes as the others: it waits for half of its time
    assert {waiting[s] for s in (1, 2, 3, 5)} == {1 / (2 * len(SPEEDS))} and waiting[0] > waiting[1]


def test_waiting_for_all_makes_reads_as_late_as_the_place_among_the_pushes():
    (all_wait,) = (each for each in measured() if each.slack == 0)
    assert sorted(all_wait.staleness) == sorted([*range(len(SPEEDS))] * (len(all_wait.staleness) // len(SPEEDS)))
    assert fmean(all_wait.staleness) == (len(SPEEDS) - 1) / 2


def test_figure_and_table_show_all_bounds():
    axis = draw_regret(measured()).axes[0]
    assert len(axis.lines) == len(BOUNDS) + 2 and axis.get_xscale() == axis.get_yscale() == "log"
    table = regret_table(measured())
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3", "5", "none"]
    assert [float(row[4]) for row in table.rows] == [round(each.regret[-1], 4) for each in measured()]
