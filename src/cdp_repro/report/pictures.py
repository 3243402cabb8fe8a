"""The figures of the report: what draws each, the rows behind it, and its caption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from cdp_repro.report import charts
from cdp_repro.report.activation_memory import SHOWN_WORKERS
from cdp_repro.report.bounded_staleness import draw_regret, measured, regret_caption
from cdp_repro.report.contents import Report
from cdp_repro.report.delay_figures import differences, rate_caption, rate_curves
from cdp_repro.report.late_systems import draw_late_systems
from cdp_repro.report.pipeline_curves import curves, draw_curves
from cdp_repro.report.standing import Standing
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS
from cdp_repro.studies.rows import Row

_CURVES = (
    "Pipelines of 4 ranks with equal stages, from their programs. Left: micro-batches whose activations the first rank "
    "keeps. Right: idle share; one_f_one_b idles as gpipe does, interleaved has two stages a rank, zero_bubble counts "
    "a part of a backward as a slot, and cdp_v2 is never idle."
)
_LATE = (
    "Test top-1 at the end against how late reads are, a point a seed. All have one learning rate for each image; the "
    "second dp updates after each micro-batch and reads fresh, which tells what small updates do from what delay does."
)
_DIFFERENCES = (
    "Difference of each setting from data parallelism with the same optimizer, at the learning rates of the tables: "
    "mean over seeds with its 95 % interval. Circles give no verdict; where a panel of diamonds follows, they have "
    "chosen the best of each mode, which the diamonds judge on fresh seeds. The grey band is the margin of equivalence "
    "that was stated before. A method that also helps, or hurts, data parallelism has a difference from a better, or "
    "worse, one: the last column of the tables compares all with the first."
)

_Figures = Mapping[str, tuple[Callable[[], Figure] | None, Sequence[Row], str]]
"""By name: what draws a figure, None if it has no data; the rows behind it; its caption."""


@dataclass(frozen=True)
class Shown:
    """A figure, the digest of its data, and its caption."""

    draw: Callable[[], Figure]
    """Draws it; some figures need many seconds of simulation."""
    data: str
    """Digest of the rows behind it."""
    caption: str


def pictures(report: Report) -> dict[str, Shown]:
    """Return all figures that have data, by name."""
    found = {
        **_of_memory(report), **_of_costs(report), **_of_accuracy(report), **_of_delay(report)
    }  # fmt: skip
    shown = {
        name: Shown(draw, _digest(row.digest for row in rows), caption)
        for name, (draw, rows, caption) in found.items()
        if rows and draw is not None
    }
    systems = Shown(partial(draw_curves, curves()), _digest([repr(curves())]), _CURVES)
    regret = Shown(partial(draw_regret, measured()), _digest([repr(measured())]), regret_caption())
    return {**shown, "systems": systems, "regret": regret}


def _of_memory(report: Report) -> _Figures:
    """Return those of the memory study."""
    return {
        "peaks": (
            partial(charts.peak_bars, report.cases) if report.cases else None, report.rows_of("memory"),
            f"Activation peak of CDP-v2 over that of DP, executed with N = {SHOWN_WORKERS}. Look at how far the "
            "bars stand above the dotted line of equal stages, and what each remedy brings.",
        ),
        "memory": (
            partial(charts.memory_curves, report.cases) if report.cases else None, report.rows_of("memory"),
            "Live activation bytes of all workers on one device, executed: data parallelism rises to N times the "
            "activations of a micro-batch, CDP fills once and stays flat. Look at how far the flat part lies above "
            "the dotted line of equal stages, and how cutting by activation bytes brings it down.",
        ),
        "reduction": (
            partial(charts.reduction_curves, report.cases) if report.cases else None, report.rows_of("memory"),
            "Activation peak of CDP-v2 over that of DP against the number of workers. Lines are simulated from the "
            "measured bytes of every block; points are executed (filled: paper order, hollow: backward first, "
            "diamonds: every block a stage). Right of the grey line there are more stages than blocks, and blocks "
            "are taken as divisible.",
        ),
    }  # fmt: skip


def _of_costs(report: Report) -> _Figures:
    """Return those of the cost study."""
    costs, n = report.groups.get("costs", []), max(EXECUTED_WORKERS)
    return {
        "timelines": (
            _as_drawn(charts.timelines(costs, 3)),
            [r for r in report.rows_of("costs") if r.config["workers"] == 3],
            "Timelines of DP, CDP-v1 and CDP-v2 with N = S = 3, drawn from the programs that ran: DP has all "
            "workers on one stage in a slot, CDP one worker on each. Numbers are the parameter versions read: "
            "CDP-v2 reads the newest wherever it is ready.",
        ),
        "communication": (
            _as_drawn(charts.communication(costs, n)),
            [r for r in report.rows_of("costs") if r.config["workers"] == n],
            "Bytes that all ranks send in each slot of a training step, executed: DP sends all gradients as the "
            "backward passes end, CDP a part in every slot. The areas of a panel are equal but for model "
            "parallelism, whose groups differ in size.",
        ),
    }  # fmt: skip


def _of_accuracy(report: Report) -> _Figures:
    """Return those of the studies of accuracy, and of systems that read late."""
    return {
        "accuracy": (
            _as_drawn(charts.accuracy_curves(report.comparisons)),
            [r for e in report.comparisons for r in e.group.rows],
            "Test top-1 (of text: validation loss) after each epoch, mean over seeds with the range between the "
            "lowest and the highest.",
        ),
        "staleness": (
            _as_drawn(charts.staleness(report.comparisons)), [r for e in report.comparisons for r in e.group.rows],
            charts.staleness_caption(report.comparisons),
        ),
        "late": (
            _as_drawn(draw_late_systems(report.late)),
            [r for e in report.late if e.group is not None for r in e.group.rows], _LATE,
        ),
    }  # fmt: skip


def _of_delay(report: Report) -> _Figures:
    """Return those of the studies of delay that have begun."""
    tuning, compared = report.begun("delay-tuning", "delay-finals"), report.begun("delay")
    panels: dict[str, list[Standing]] = {}
    for each in report.standings:
        panels.setdefault(each.study.network, []).append(each)
    return {
        "rates": (
            _as_drawn(rate_curves(report.tunings)), report.rows_of(*(study.name for study in tuning)),
            rate_caption(report.tunings),
        ),
        "differences": (
            _as_drawn(differences(panels)), report.rows_of(*(study.name for study in compared)), _DIFFERENCES,
        ),
    }  # fmt: skip


def _as_drawn(figure: Figure | None) -> Callable[[], Figure] | None:
    return None if figure is None else lambda: figure


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
