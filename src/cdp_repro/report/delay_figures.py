"""The figures of what delay costs: at how many learning rates training works, and what each method makes up for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cdp_repro.report.charts import plain_axes, style
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing
from cdp_repro.report.tuning import loss_of, method_of, optimizer_of

NEAR = 0.1
"""A learning rate is as good as data parallelism's best if the training loss exceeds that by at most this share."""

SHOWN = 1.6
"""The frame of a panel shows losses up to this factor times the lowest."""

_DP_LINES = ("--", (0, (1, 2)))
"""Line styles of data parallelism: without and with Nesterov's momentum."""

_MARKERS = "osD^vPX"

Groups = Mapping[str, Sequence[Group]]
"""Groups of a study by the title of its network."""


def rate_curves(tunings: Groups) -> Figure | None:
    """Draw the training loss against the learning rate: a row per tuning and optimizer, a column per mode.

    A line is a method, and looks the same in all panels; data parallelism is in each. A diverged run has no point: its
    line ends.
    """
    every = [group for groups in tunings.values() for group in groups]
    modes = sorted({group.mode for group in every} - {"dp"})
    if not modes:
        return None
    rows: dict[tuple[str, str], list[Group]] = {}
    for title, groups in tunings.items():
        for group in groups:
            rows.setdefault((group.config["optim.name"], title), []).append(group)
    looks = _looks(every)
    figure = Figure(figsize=(4.2 * len(modes), 2.3 * len(rows) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), len(modes), squeeze=False, sharey="row")
    for line, ((optimizer, title), groups) in zip(panels, rows.items(), strict=True):
        for axis, mode in zip(line, modes, strict=True):
            _draw_rates(axis, [group for group in groups if group.mode in ("dp", mode)], looks)
            axis.set_title(f"{mode}, {optimizer}: {title}", fontsize="small")
        line[0].set_ylabel("training loss [nats]", fontsize="small")
        line[0].set_ylim(*_frame(groups))
    for axis in panels[-1]:
        axis.set_xlabel("learning rate")
    handles = {label: line for axis in figure.axes for line in axis.lines if (label := str(line.get_label()))}
    figure.legend([handles[name] for name in looks], [*looks], loc="outside lower center", ncols=3, frameon=False)
    return figure


def _line_name(group: Group) -> str:
    """Return the method without the optimizer, which the title of a panel names."""
    method = method_of(group.config).removeprefix(group.config["optim.name"]).lstrip(" +,")
    return f"dp {method}".rstrip() if group.mode == "dp" else method or "no method"


def _looks(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Return how the line of each name looks, data parallelism first."""
    names = dict.fromkeys(_line_name(group) for group in sorted(groups, key=lambda group: group.mode != "dp"))
    ours = [name for name in names if not name.startswith("dp")]
    dp = dict(zip((name for name in names if name.startswith("dp")), cycle(_DP_LINES), strict=False))
    looks = {name: {**style("dp"), "linestyle": dp[name]} if name in dp else style(name, ours) for name in names}
    return {name: {**look, "marker": mark} for (name, look), mark in zip(looks.items(), cycle(_MARKERS), strict=False)}


def _curves(groups: Iterable[Group]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the training loss by learning rate, for each mode and method."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for group in sorted(groups, key=lambda group: float(group.config["optim.lr"])):
        found.setdefault((group.mode, method_of(group.config)), {})[group.config["optim.lr"]] = loss_of(group)
    return found


def _frame(groups: Iterable[Group]) -> tuple[float, float]:
    """Return the range of losses that a row shows: up to at most `SHOWN` times the lowest, to show differences."""
    finite = [loss for group in groups if math.isfinite(loss := loss_of(group))] or [1.0]
    return 0.97 * min(finite), min(SHOWN * min(finite), 1.03 * max(finite))


def _draw_rates(axis: Axes, groups: Sequence[Group], looks: Mapping[str, Mapping[str, Any]]) -> None:
    names = {(group.mode, method_of(group.config)): _line_name(group) for group in groups}
    curves = _curves(groups)
    for setting, curve in curves.items():
        finite = {rate: loss for rate, loss in curve.items() if math.isfinite(loss)}
        name = names[setting]
        axis.plot([*finite], [*finite.values()], markersize=3.5, linewidth=1.2, label=name, **looks[name])
    rates = sorted({rate for curve in curves.values() for rate in curve})
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=35, fontsize="small")
    axis.xaxis.set_minor_locator(NullLocator())
    plain_axes(axis)


def rate_caption(tunings: Groups) -> str:
    """Return the caption of `rate_curves`: at how many learning rates delay reaches the loss of data parallelism."""
    said = [
        "Mean training loss of the last epoch, at the parameters that were read, against the learning rate; one run a "
        f"point. What leaves the frame has diverged, or is more than {100 * (SHOWN - 1):.0f} % above the lowest loss "
        "with the same optimizer."
    ]
    return " ".join([*said, *(_widths(title, groups) for title, groups in tunings.items())]).rstrip()


def _widths(title: str, groups: Sequence[Group]) -> str:
    """Return at how many learning rates settings with delay come near the lowest loss of dp with the same optimizer.

    It takes settings that ran at all rates, as dp with their optimizer did; none if all rates are good for both.
    """
    curves = _curves(groups)
    optimizers = {(group.mode, method_of(group.config)): optimizer_of(group.config) for group in groups}
    rates = {rate for curve in curves.values() for rate in curve}
    both: list[tuple[int, int]] = []
    for setting, curve in curves.items():
        dp = curves.get(("dp", optimizers[setting]), {})
        if setting[0] == "dp" or not curve.keys() == dp.keys() == rates:
            continue
        limit = (1 + NEAR) * min(dp.values())
        good = tuple(sum(loss <= limit for loss in each.values()) for each in (curve, dp))
        if min(good) < len(rates):
            both.append((good[0], good[1]))
    if not both:
        return ""
    fewer, more = sum(ours < dp for ours, dp in both), sum(ours > dp for ours, dp in both)
    none = sum(ours == 0 for ours, _ in both)
    return (
        f"{title}: learning rates within {100 * NEAR:g} % of the lowest loss of dp with the same optimizer, beside "
        f"dp's own number: fewer in {fewer} of {len(both)} settings with delay (none in {none}), more in {more}."
    )


def differences(panels: Mapping[str, Sequence[Standing]]) -> Figure | None:
    """Draw the difference of each setting from data parallelism with its 95 % interval.

    A network has a panel for the studies without a verdict, with circles, and one for the fresh seeds that judge, with
    diamonds, whose differences are smaller. The grey band is the margin of equivalence. A difference on one seed has
    no interval, and is not drawn. One whose interval is unknown is a marker alone.
    """
    shown: dict[str, list[Standing]] = {}
    for title, standings in panels.items():
        for each in standings:
            if each.found and each.found.difference.n > 1:
                shown.setdefault(title if each.study.margin is None else f"{title}, fresh seeds", []).append(each)
    if not shown:
        return None
    heights = [len(standings) + 3 for standings in shown.values()]
    figure = Figure(figsize=(7.6, 0.27 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, standings) in zip(axes, shown.items(), strict=True):
        _draw_differences(axis, standings)
        axis.set_title(title, fontsize="medium")
    return figure


def _draw_differences(axis: Axes, standings: Sequence[Standing]) -> None:
    for place, each in enumerate(standings):
        assert each.found is not None
        found = each.found.difference
        ends = None if math.isnan(found.low) else [[found.mean - found.low], [found.high - found.mean]]
        mark = "o" if each.study.margin is None else "D"
        colour = style(each.group.mode)["color"]
        axis.errorbar([found.mean], [place], xerr=ends, fmt=mark, markersize=4, capsize=3, color=colour)
    axis.axvline(0, color=style("dp")["color"], linestyle="--", linewidth=0.9)
    if (margin := standings[0].study.margin) is not None:
        axis.axvspan(-margin, margin, color="grey", alpha=0.15, linewidth=0)
    names = [f"{each.group.mode}, {method_of(each.group.config)}" for each in standings]
    axis.set_yticks(range(len(standings)), names, fontsize="small")
    axis.set_ylim(len(standings) - 0.5, -0.5)
    task = standings[0].task
    side = "right" if task.more_is_better else "left"
    axis.set_xlabel(f"{task.label} minus that of dp [{task.difference_unit}]: {side} is better", fontsize="small")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
