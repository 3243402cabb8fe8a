"""The figures of what delay costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_rows import row_of

from cdp_repro.report.charts import style
from cdp_repro.report.delay_figures import differences, rate_caption, rate_curves
from cdp_repro.report.groups import grouped
from cdp_repro.report.standing import standings
from cdp_repro.studies.delay_studies import CIFAR10, TUNING_SEED
from cdp_repro.studies.rows import DIVERGED

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
    assert [first.get_title(), second.get_title()] == ["cdp_v1, sgd: digits", "cdp_v2, sgd: digits"]
    assert {line.get_label() for line in first.lines} == {"dp", "no method", "prediction"}
    assert {line.get_label() for line in second.lines} == {"dp", "no method"}
    drawn = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in first.lines}
    assert drawn["dp"] == (0.1, 0.2, 0.4, 0.8, 1.08, 1.0, 1.02, 1.05)
    assert drawn["no method"] == (0.1, 0.2, 0.4, 1.5, 1.4, 2.0), "the line ends where the run diverged"


def test_each_optimizer_has_a_row_with_a_frame_of_its_own_and_one_legend_names_all_lines():
    """With one frame, curves of an optimizer with higher losses lay outside; with a legend each, panels had no room."""
    groups = tuning_groups()
    higher = [with_settings(with_loss(group, 3.0), {"optim.name": "adamw"}) for group in groups if not group.diverged]
    nesterov = [with_settings(group, {"optim.nesterov": True}) for group in groups if group.mode == "dp"]
    figure = rate_curves({"digits": [*groups, *nesterov, *higher]})
    assert [axis.get_title() for axis in figure.axes] == [
        "cdp_v1, sgd: digits", "cdp_v2, sgd: digits", "cdp_v1, adamw: digits", "cdp_v2, adamw: digits"
    ]  # fmt: skip
    assert figure.axes[0].get_ylim() != figure.axes[2].get_ylim() and figure.axes[2].get_ylim()[0] > 2
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["dp", "dp nesterov", "no method", "prediction"]
    assert {line.get_label() for axis in figure.axes for line in axis.lines} == {*names}
    figure.draw_without_rendering()
    assert sum(axis.get_position().width for axis in figure.axes[:2]) > 0.8, "of the figure"


def with_loss(group, loss):
    return replace(group, rows=tuple(replace(row, summary={**row.summary, "train/loss": loss}) for row in group.rows))


def with_settings(group, settings):
    return replace(group, rows=tuple(replace(row, config={**row.config, **settings}) for row in group.rows))


BESIDE = "digits: learning rates within 10 % of the lowest loss of dp with the same optimizer, beside dp's own number: "


def test_the_caption_counts_the_rates_at_which_delay_reaches_the_loss_of_data_parallelism():
    caption = rate_caption({"digits": tuning_groups()})
    assert caption.endswith(f"{BESIDE}fewer in 3 of 3 settings with delay (none in 1), more in 0.")
    steep = {"dp": (1.2, 1.0, 1.02, 1.2), "cdp_v1": (1.05, 1.0, 1.02, 1.2), "cdp_v2": (1.2, 1.02, 1.0, 1.2)}
    groups = [
        with_loss(group, steep[group.mode][SMALL.grid.index(group.config["optim.lr"])])
        for group in tuning_groups()
        if not group.diverged and group.config["delay.name"] == "none"
    ]
    groups += [with_loss(with_summary_of_a_finished(group), 1.2) for group in tuning_groups() if group.diverged]
    assert rate_caption({"digits": groups}).endswith(
        f"{BESIDE}fewer in 0 of 2 settings with delay (none in 0), more in 1."
    )


def with_summary_of_a_finished(group):
    summary = {key: value for key, value in group.rows[0].summary.items() if key != DIVERGED}
    return replace(group, rows=(replace(group.rows[0], summary=summary),))


def test_a_plateau_far_above_data_parallelism_is_no_range_of_good_rates():
    groups = [with_loss(group, 1.5) if group.mode == "cdp_v2" else group for group in tuning_groups()]
    assert "(none in 2)" in rate_caption({"digits": groups}), "however wide it is"


def test_ranges_that_rates_cut_off_are_not_compared():
    groups = tuning_groups()
    flat = [with_loss(with_summary_of_a_finished(group), 1.0) for group in groups]
    few = [group for group in groups if group.mode == "dp" or group.config["optim.lr"] < 0.8]
    for each in (flat, few):
        assert "digits" not in rate_caption({"digits": each})


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
    assert axis.get_xlabel() == "test top-1 [%] minus that of dp [points]: right is better"
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
    chosen, judged = figure.axes
    assert [axis.get_title() for axis in (chosen, judged)] == ["digits", "digits, fresh seeds"]
    assert not chosen.patches, "it has no verdict"
    (band,) = judged.patches
    assert [text.get_text() for text in judged.get_yticklabels()] == ["cdp_v1, sgd + prediction", "cdp_v2, sgd"]
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
