"""The figures of what delay costs: where it narrows the range of learning rates, and what each method makes up for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cdp_repro.config.task import task_of
from cdp_repro.report.charts import plain_axes, style
from cdp_repro.report.delay_costs import against_data_parallelism, loss_of, method_of
from cdp_repro.report.groups import Group
from cdp_repro.studies.study import Study

NEAR = 0.1
"""A learning rate is near the best if the training loss exceeds the lowest by at most this share."""

Groups = Mapping[str, Sequence[Group]]
"""Groups of a study by the title of its network."""


def _curves(groups: Sequence[Group]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the training loss by learning rate, for each mode and method."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for group in sorted(groups, key=lambda group: float(group.config["optim.lr"])):
        found.setdefault((group.mode, method_of(group.config)), {})[group.config["optim.lr"]] = loss_of(group)
    return found


def rate_curves(tunings: Groups) -> Figure | None:
    """Draw the training loss against the learning rate: a row a network, a column a mode, a line a method.

    Data parallelism stands in every panel. What diverged has no point: its line ends.
    """
    modes = sorted({group.mode for groups in tunings.values() for group in groups} - {"dp"})
    if not modes:
        return None
    figure = Figure(figsize=(4.6 * len(modes), 3.4 * len(tunings) + 0.3), layout="constrained")
    panels = figure.subplots(len(tunings), len(modes), squeeze=False, sharey="row")
    for line, (title, groups) in zip(panels, tunings.items(), strict=True):
        curves = _curves(groups)
        for axis, mode in zip(line, modes, strict=True):
            shown = {key: curve for key, curve in curves.items() if key[0] in ("dp", mode)}
            _draw_rates(axis, shown)
            axis.set_title(f"{mode}: {title}", fontsize="medium")
        line[0].set_ylabel("training loss [nats]")
    return figure


def _draw_rates(axis: Axes, curves: Mapping[tuple[str, str], Mapping[float, float]]) -> None:
    methods = list(dict.fromkeys(method for mode, method in curves if mode != "dp"))
    for (mode, method), curve in curves.items():
        finite = {rate: loss for rate, loss in curve.items() if math.isfinite(loss)}
        look = style("dp") if mode == "dp" else style(method, methods)
        label = f"dp, {method}" if mode == "dp" else method
        axis.plot([*finite], [*finite.values()], marker="o", markersize=3, linewidth=1.2, label=label, **look)
    rates = sorted({rate for curve in curves.values() for rate in curve})
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("learning rate")
    axis.legend(frameon=False, fontsize="small")
    plain_axes(axis)


def rate_caption(tunings: Groups) -> str:
    """Return the caption of `rate_curves`: how wide the range of good learning rates is."""
    said = ["Training loss at the end of the tuning runs against the learning rate, one run a point."]
    for title, groups in tunings.items():
        ranges = [f"{mode} ({method}) {_near_best(curve)}" for (mode, method), curve in _curves(groups).items()]
        said.append(f"{title}: within {100 * NEAR:g} % of its own lowest loss are {'; '.join(ranges)}.")
    return " ".join(said)


def _near_best(curve: Mapping[float, float]) -> str:
    lowest = min(curve.values())
    near = [rate for rate, loss in curve.items() if loss <= (1 + NEAR) * lowest]
    return f"{near[0]:g} to {near[-1]:g}" if len(near) > 1 else f"{near[0]:g} alone"


def differences(studies: Sequence[tuple[Study, Sequence[Group]]]) -> Figure | None:
    """Draw the difference of each setting from data parallelism with its 95 % interval: a panel a network.

    A grey band is the margin of equivalence, where the study states one.
    """
    shown = [(study, groups) for study, groups in studies if any(_points(study, groups))]
    if not shown:
        return None
    figure = Figure(figsize=(5.2 * len(shown), 3.6), layout="constrained")
    for axis, (study, groups) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _draw_differences(axis, study, groups)
    return figure


def _points(study: Study, groups: Sequence[Group]) -> list[tuple[Group, float, float, float]]:
    """Return mean, low and high end of the interval of each setting but data parallelism."""
    found = []
    for group in groups:
        result = against_data_parallelism(groups, group, study.margin or 0.0)
        if result is not None:
            found.append((group, result.difference.mean, result.difference.low, result.difference.high))
    return found


def _draw_differences(axis: Axes, study: Study, groups: Sequence[Group]) -> None:
    task = task_of(study.cells[0].settings["dataset.name"])
    points = _points(study, groups)
    for place, (group, mean, low, high) in enumerate(points):
        ends = [[0.0 if math.isnan(low) else mean - low], [0.0 if math.isnan(high) else high - mean]]
        axis.errorbar([mean], [place], xerr=ends, fmt="o", markersize=4, capsize=3, color=style(group.mode)["color"])
    axis.axvline(0, color=style("dp")["color"], linestyle="--", linewidth=0.9)
    if study.margin:
        axis.axvspan(-study.margin, study.margin, color="grey", alpha=0.15, linewidth=0)
    names = [f"{group.mode}, {method_of(group.config)}" for group, *_ in points]
    axis.set_yticks(range(len(points)), names, fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel(f"{task.label} minus that of dp [{task.difference_unit}]")
    axis.set_title(study.title, fontsize="medium")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
