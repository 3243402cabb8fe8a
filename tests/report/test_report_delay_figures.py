"""The figures of what delay costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from report_rows import row_of

from cdp_repro.report.charts import style
from cdp_repro.report.delay_figures import _near_best, differences, rate_caption, rate_curves
from cdp_repro.report.groups import grouped
from cdp_repro.report.standing import standings
from cdp_repro.studies.delay_studies import CIFAR10, TUNING_SEED

SETTINGS = ("mode=dp", "mode=cdp_v1", "mode=cdp_v1 delay=prediction", "mode=cdp_v2")
SMALL = replace(
    CIFAR10, base="dataset=digits epochs=2", settings=SETTINGS, grid=(0.1, 0.2, 0.4, 0.8), seeds=(0, 1, 2),
    finalists={}, rates=dict.fromkeys(SETTINGS, 0.2), best=SETTINGS[2:], judged_before=(),
)  # fmt: skip
TUNING, DELAY, VERDICT, _ = SMALL.studies()
LOSSES = {
    ("dp", "none"): (1.08, 1.0, 1.02, 1.05),
    ("cdp_v1", "none"): (1.5, 1.4, 2.0, None),  # None: it diverged
    ("cdp_v1", "prediction"): (1.2, 1.1, 1.15, 1.6),
    ("cdp_v2", "none"): (1.2, 1.1, 1.15, 1.6),
}


def tuning_groups():
    rows = []
    for cell in TUNING.cells:
        loss = LOSSES[cell.settings["mode.name"], cell.settings["delay.name"]][
            SMALL.grid.index(cell.settings["optim.lr"])
        ]
        rows.append(
            row_of(cell, TUNING_SEED, TUNING.name, **({"diverged": True} if loss is None else {"train/loss": loss}))
        )
    return grouped(rows, TUNING.varied)


def delay_groups(study, differences_of):
    rows = [
        row_of(cell, seed, study.name, 90.0 + differences_of[number][seed % 3])
        for number, cell in enumerate(study.cells) for seed in cell.seeds
    ]  # fmt: skip
    return grouped(rows, study.varied)


def test_a_panel_a_mode_with_data_parallelism_in_each():
    figure = rate_curves({"digits": tuning_groups()})
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == ["cdp_v1: digits", "cdp_v2: digits"]
    assert {line.get_label() for line in first.lines} == {"dp, sgd", "sgd", "sgd + prediction"}
    assert {line.get_label() for line in second.lines} == {"dp, sgd", "sgd"}
    drawn = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in first.lines}
    assert drawn["dp, sgd"] == (0.1, 0.2, 0.4, 0.8, 1.08, 1.0, 1.02, 1.05)
    assert drawn["sgd"] == (0.1, 0.2, 0.4, 1.5, 1.4, 2.0), "the line ends where the run diverged"


def test_the_caption_says_how_wide_the_range_of_good_rates_is():
    caption = rate_caption({"digits": tuning_groups()})
    assert "digits: within 10 % of its own lowest loss are " in caption
    for said in ("dp (sgd) 0.1 to 0.8", "cdp_v1 (sgd) 0.1 to 0.2", "cdp_v1 (sgd + prediction) 0.1 to 0.4"):
        assert said in caption


def test_the_caption_counts_in_how_many_settings_delay_narrows_the_range():
    widths = "settings with delay have a narrower range than dp with the same optimizer, "
    assert f"3 of 3 {widths}0 one as wide, 0 a wider one." in rate_caption({"digits": tuning_groups()})
    steep = {"dp": (1.2, 1.0, 1.02, 1.2), "cdp_v1": (1.05, 1.0, 1.02, 1.2), "cdp_v2": (1.2, 1.02, 1.0, 1.2)}
    groups = [
        replace(group, rows=tuple(replace(row, summary={**row.summary, "train/loss": loss}) for row in group.rows))
        for group in tuning_groups()
        for loss in [steep[group.mode][SMALL.grid.index(group.config["optim.lr"])]]
        if not group.diverged and group.config["delay.name"] == "none"
    ]
    groups += [replace(group, rows=(replace(group.rows[0], summary={"train/loss": 1.2}),))
               for group in tuning_groups() if group.diverged]  # fmt: skip
    assert f"0 of 2 {widths}1 one as wide, 1 a wider one." in rate_caption({"digits": groups})


def test_ranges_that_rates_cut_off_are_not_compared():
    groups = tuning_groups()
    alike = {"train/loss": 1.0}
    flat = [replace(group, rows=(replace(group.rows[0], summary=alike),)) for group in groups]
    few = [group for group in groups if group.mode == "dp" or group.config["optim.lr"] < 0.8]
    for each in (flat, few):
        caption = rate_caption({"digits": each})
        assert "Too few rates ran to compare how wide these ranges are." in caption and "narrow" not in caption


def test_differences_are_those_of_paired_seeds_with_their_interval():
    shifts = [(0.0, 1.0, 2.0), (-1.0, 0.0, 1.0), (0.0, 1.5, 1.5), (0.0, 1.0, 2.0)]
    figure = differences({"digits": standings(DELAY, {DELAY.name: delay_groups(DELAY, shifts)})})
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        "cdp_v1, sgd", "cdp_v1, sgd + prediction", "cdp_v2, sgd"
    ]  # fmt: skip
    means = [container.lines[0].get_xdata()[0] for container in axis.containers]
    assert means == pytest.approx([-1.0, 0.0, 0.0], abs=1e-9)
    (low,), (high,) = (cap.get_xdata() for cap in axis.containers[1].lines[1])
    assert low == pytest.approx(-high) and low < -1, "Student's t with two degrees, of differences 0, 0.5, -0.5"
    assert axis.get_xlabel() == "test top-1 [%]\nminus that of dp with the same optimizer\n[points], right is better"
    assert not axis.patches, "no margin was stated"


def test_a_difference_whose_interval_is_unknown_is_a_marker_alone():
    shifts = [(0.0, 1.0, 2.0), (1.0, 2.0, 3.0), (0.0, 1.5, 1.5), (0.0, 1.0, 2.0)]
    figure = differences({"digits": standings(DELAY, {DELAY.name: delay_groups(DELAY, shifts)})})
    alike, apart, _ = figure.axes[0].containers
    assert alike.lines[0].get_xdata()[0] == pytest.approx(1.0) and apart.has_xerr
    assert not alike.has_xerr, "equal differences say nothing of how far seeds differ"


def test_the_margin_of_a_study_is_shown():
    both = {study.name: delay_groups(study, [(0.0, 0.1, 0.2)] * 4) for study in (DELAY, VERDICT)}
    figure = differences({"digits": [*standings(DELAY, both), *standings(VERDICT, both)]})
    (axis,) = figure.axes
    (band,) = axis.patches
    assert [text.get_text() for text in axis.get_yticklabels()][-2:] == [
        "cdp_v1, sgd + prediction, fresh seeds", "cdp_v2, sgd, fresh seeds"
    ]  # fmt: skip
    assert [band.get_x(), band.get_x() + band.get_width()] == [-VERDICT.margin, VERDICT.margin]


def test_without_anything_to_compare_there_is_no_figure():
    alone = [group for group in tuning_groups() if group.mode == "dp"]
    assert rate_curves({}) is None and rate_curves({"digits": alone}) is None
    alone = [group for group in delay_groups(DELAY, [(0.0, 1.0, 2.0)] * 4) if group.mode == "dp"]
    assert differences({}) is None
    assert differences({"digits": standings(DELAY, {DELAY.name: alone})}) is None


def test_a_difference_on_one_seed_has_no_interval_and_is_not_drawn():
    groups = delay_groups(DELAY, [(0.0, 1.0, 2.0)] * 4)
    single = [replace(group, rows=group.rows[:1]) for group in groups]
    found = standings(DELAY, {DELAY.name: single})
    assert any(each.found for each in found) and differences({"digits": found}) is None


def test_as_many_methods_as_all_networks_have_look_different():
    methods = [f"method {number}" for number in range(20)]
    looks = [str(style(each, methods)) for each in (*methods, "dp", "cdp_v1")]
    assert len(looks) == len({*looks})


def test_methods_look_the_same_in_all_panels_and_losses_near_the_lowest_fill_the_frame():
    figure = rate_curves({"digits": tuning_groups(), "more digits": tuning_groups()})
    looks = {}
    for axis in figure.axes:
        for line in axis.lines:
            looks.setdefault(line.get_label(), set()).add((line.get_color(), str(line.get_linestyle())))
    assert all(len(look) == 1 for look in looks.values()) and len({*map(str, looks.values())}) == len(looks)
    assert figure.axes[0].get_ylim() == pytest.approx((0.97, 1.6)), "of the lowest loss, 1.0"


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ({0.1: 1.0, 0.2: 1.5, 0.4: 1.02}, "0.1 alone"),
        ({0.1: 1.05, 0.2: 1.0, 0.4: 1.02, 0.8: 2.0}, "0.1 to 0.4"),
        ({0.1: math.inf, 0.2: math.inf}, "none, as all diverge"),
    ],
)
def test_the_range_of_good_rates_is_the_one_around_the_best(curve, said):
    assert _near_best(curve) == said
