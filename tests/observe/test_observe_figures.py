"""Figures show what the schedule holds."""

from __future__ import annotations

from collections import Counter

import pytest

from cdp_repro.observe.figures import memory_figure, save_figure, timeline_figure
from cdp_repro.observe.rank_figures import rank_timelines
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.lanes import Lanes


def test_the_timeline_has_a_cell_for_every_action(tmp_path):
    slots = Program(Schedule.build("cdp_v2", 3)).slots(2)
    figure = timeline_figure({"cdp_v2": slots}, {"cdp_v2": Lanes(3)}, stages=3)
    (axis,) = figure.axes
    texts = [text.get_text() for text in axis.texts]
    assert len(texts) == 2 * 3 * 3 * 2
    assert sum(text.startswith("↑") for text in texts) == sum(text.startswith("↓") for text in texts)
    assert axis.get_xlabel() and axis.get_ylabel() == "stage"


@pytest.mark.parametrize(("mode", "workers", "stages"), [("cdp_v2", 2, 2), ("dp", 4, 2), ("dp", 8, 2), ("dp", 3, 3)])
def test_nothing_of_a_timeline_is_cut_at_its_edges(mode, workers, stages):
    slots = Program(Schedule.build(mode, workers, stages)).slots(1)
    figure = timeline_figure({mode: slots}, {mode: Lanes(workers)}, stages)
    figure.draw_without_rendering()
    for shown in (figure.legends[0], figure.axes[0].xaxis.label):
        box = shown.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0, (shown, box)


def test_a_timeline_with_slots_in_which_nothing_begins_is_drawn_to_its_end():
    schedule = Schedule.build("async", 2, 2, "parameter_server", speeds=(4, 3))
    slots = simulate(Program(schedule), StageCosts.equal(2), 1).slots
    (axis,) = timeline_figure({"async": slots}, {"async": schedule.timeline.lanes}, stages=2).axes
    cells = [path.get_extents() for patches in axis.collections for path in patches.get_paths()]
    assert len(slots) < axis.get_xlim()[1] == max(cell.x1 for cell in cells)


SPLIT = Program(Schedule.build("zero_bubble", 2, placement="pipeline"))
"""With forwards, backwards, and gradients of weights that are computed apart."""


def test_arrows_point_where_a_micro_batch_goes_and_a_dot_where_it_stays():
    slots = SPLIT.slots(1)
    figure = timeline_figure({"": slots}, {"": SPLIT.schedule.timeline.lanes}, stages=2)
    drawn = Counter(text.get_text()[0] for text in figure.axes[0].texts)
    letters = Counter(str(action.op) for slot in slots for action in slot.actions if action.op.is_compute)
    assert drawn == {"↑": letters["F"], "↓": letters["B"] + letters["I"], "•": letters["W"]} and letters["W"]


def test_each_kind_of_compute_has_its_own_opacity_on_a_rank():
    figure = rank_timelines({"zero_bubble": SPLIT.slots(1)}, 2)
    cells = Counter()
    for patches in figure.axes[0].collections:
        cells[patches.get_alpha()] += len(patches.get_paths())
    assert cells == {1.0: 4, 0.55: 4, 0.25: 4}


def test_the_memory_curve_shows_bytes_per_slot():
    trace = simulate(Program(Schedule.build("cdp_v1", 4)), StageCosts.equal(4, 2**20), 2)
    figure = memory_figure({"cdp_v1": trace.activation_bytes_per_slot}, "title")
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata()) == [value / 2**20 for value in trace.activation_bytes_per_slot.values()]
    assert "MiB" in figure.axes[0].get_ylabel()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_saving_twice_gives_the_same_bytes(tmp_path, suffix):
    for name in ("one", "two"):
        figure = memory_figure({"dp": {0: 1, 1: 2}}, "title")
        save_figure(figure, tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_bytes_are_shown_in_a_unit_that_fits():
    expected = {0: "0 bytes", 1: "1 bytes", 1536: "1.5 KiB", 3 * 2**20: "3 MiB", 2**31: "2 GiB"}
    assert {number: format_bytes(number) for number in expected} == expected
