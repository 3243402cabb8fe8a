"""The table and the figure of systems that read late."""

from __future__ import annotations

from report_rows import row_of

from cdp_repro.report.groups import grouped
from cdp_repro.report.late_systems import draw_late_systems, late_systems, late_systems_table
from cdp_repro.studies.catalog import STUDIES

STUDY = STUDIES["cifar10-late-systems"]
REFERENCE = STUDIES["cifar10"]


def systems(mode="", *, with_reference=True):
    """Of the committed study, as if the cells whose command names `mode` had run on both seeds, and its reference."""
    ran = [cell for cell in STUDY.cells if mode in cell.command(0)]
    rows = [row_of(cell, seed, STUDY.name, 80.0 + seed) for cell in ran for seed in cell.seeds]
    others = [row_of(cell, seed, REFERENCE.name, 82.0) for cell in REFERENCE.cells for seed in cell.seeds]
    groups = {REFERENCE.name: grouped(others, REFERENCE.varied)} if with_reference else {}
    return late_systems({**groups, STUDY.name: grouped(rows, STUDY.varied)}, STUDY)


def test_every_system_stands_beside_data_parallelism_with_how_late_it_reads():
    rows = {row[0]: row[1:] for row in late_systems_table(systems(), STUDY).rows}
    assert [*rows] == [
        "dp", "cdp_v1", "cdp_v2", "dp, a micro-batch an update", "pipedream", "ampnet", "ssp, s = 0", "ssp, s = 2",
        "ssp, s = 3", "ssp, s = 5", "async",
    ]  # fmt: skip
    assert rows["dp"][:4] == ["128", "0.00", "0", "0.00"] and rows["dp"][5] == ""
    assert rows["cdp_v1"][:4] == ["128", "1.00", "1", "1.00"]
    assert rows["dp, a micro-batch an update"][:4] == ["32", "0.00", "0", "0.00"]
    assert rows["pipedream"][:4] == ["32", "1.50", "3", "0.38"]  # stage j reads 3 - j updates late
    assert rows["ssp, s = 0"][:3] == ["32", "1.50", "3"]  # all pull at once, and push one after the other
    assert rows["async"][:2] == ["32", "3.00"]  # N - 1 others push between a pull and its push
    assert rows["pipedream"][4:6] == ["80.50 ± 0.71 (2)", "-1.50 [-7.85, +4.85] (2)"]


def test_what_has_not_run_says_how_to_run_it():
    rows = {row[0]: row for row in late_systems_table(systems("ampnet"), STUDY).rows}
    assert rows["pipedream"][5] == f"not run: `{STUDY.cells[1].command(0)}`" and rows["pipedream"][6:] == ["", ""]
    assert rows["ampnet"][5] == "80.50 ± 0.71 (2)"
    assert [row[6] for row in late_systems_table(systems(with_reference=False), STUDY).rows] == [""] * len(STUDY.cells)


def test_each_system_that_has_run_has_a_colour_and_its_seeds_in_the_figure():
    figure = draw_late_systems(systems("ssp"))
    (axis,) = figure.axes
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert [*lines] == ["dp", "cdp_v1", "cdp_v2", "ssp, s = 0", "ssp, s = 2", "ssp, s = 3", "ssp, s = 5"]
    assert len({line.get_color() for line in lines.values()}) == len(lines)
    assert [*lines["ssp, s = 0"].get_ydata()] == [80.0, 81.0] and [*lines["ssp, s = 0"].get_xdata()] == [0.375] * 2
    assert draw_late_systems(systems("workers=1")) is None  # nothing late has run
    assert late_systems({}, STUDY) == [] and draw_late_systems([]) is None
