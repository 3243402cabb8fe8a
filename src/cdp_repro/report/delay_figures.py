"""The figures of what delay costs: how wide the range of good learning rates is, and what each method makes up for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cdp_repro.report.charts import plain_axes, style
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing
from cdp_repro.report.tuning import loss_of, method_of, optimizer_of

NEAR = 0.1
"""A learning rate is near the best if the training loss exceeds the lowest by at most this share."""

SHOWN = 1.6
"""The frame of a figure shows losses up to this factor times the lowest."""

_DP_LINES = ("--", (0, (1, 2)))
"""Line styles of data parallelism, by optimizer."""

Groups = Mapping[str, Sequence[Group]]
"""Groups of a study by the title of its network."""


def _curves(groups: Sequence[Group]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the training loss by learning rate, for each mode and method."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for group in sorted(groups, key=lambda group: float(group.config["optim.lr"])):
        found.setdefault((group.mode, method_of(group.config)), {})[group.config["optim.lr"]] = loss_of(group)
    return found


def rate_curves(tunings: Groups) -> Figure | None:
    """Draw the training loss against the learning rate: a row per tuning, a column per mode, a line per method.

    Data parallelism is in every panel. A diverged run has no point: its line ends.
    """
    modes = sorted({group.mode for groups in tunings.values() for group in groups} - {"dp"})
    if not modes:
        return None
    every = [group for groups in tunings.values() for group in groups]
    methods = {is_dp: list(dict.fromkeys(method_of(g.config) for g in every if (g.mode == "dp") is is_dp))
               for is_dp in (True, False)}  # fmt: skip
    figure = Figure(figsize=(4.8 * len(modes), 4.2 * len(tunings) + 0.3), layout="constrained")
    panels = figure.subplots(len(tunings), len(modes), squeeze=False, sharey="row")
    for line, (title, groups) in zip(panels, tunings.items(), strict=True):
        curves = _curves(groups)
        for axis, mode in zip(line, modes, strict=True):
            shown = {key: curve for key, curve in curves.items() if key[0] in ("dp", mode)}
            _draw_rates(axis, shown, methods)
            axis.set_title(f"{mode}: {title}", fontsize="small")
        line[0].set_ylabel("training loss [nats]")
        line[0].set_ylim(*_frame(curves.values()))
    return figure


def _frame(curves: Iterable[Mapping[float, float]]) -> tuple[float, float]:
    """Return the range of losses that a row shows: up to at most `SHOWN` times the lowest, to show differences."""
    finite = [loss for curve in curves for loss in curve.values() if math.isfinite(loss)] or [1.0]
    return 0.97 * min(finite), min(SHOWN * min(finite), 1.03 * max(finite))


def _draw_rates(
    axis: Axes, curves: Mapping[tuple[str, str], Mapping[float, float]], methods: Mapping[bool, Sequence[str]]
) -> None:
    for (mode, method), curve in curves.items():
        finite = {rate: loss for rate, loss in curve.items() if math.isfinite(loss)}
        look = style(method, methods[False])
        if mode == "dp":
            look = {**style("dp"), "linestyle": _DP_LINES[methods[True].index(method) % len(_DP_LINES)]}
        label = f"dp, {method}" if mode == "dp" else method
        axis.plot([*finite], [*finite.values()], marker="o", markersize=3, linewidth=1.2, label=label, **look)
    rates = sorted({rate for curve in curves.values() for rate in curve})
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("learning rate")
    axis.legend(frameon=False, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    plain_axes(axis)


def rate_caption(tunings: Groups) -> str:
    """Return the caption of `rate_curves`: how wide the range of good learning rates is."""
    said = [
        "Training loss at the end against the learning rate, one run a point; what leaves the frame is more than "
        f"{100 * (SHOWN - 1):.0f} % above the lowest."
    ]
    for title, groups in tunings.items():
        curves = _curves(groups)
        ranges = [f"{mode} ({method}) {_near_best(curve)}" for (mode, method), curve in curves.items()]
        said.append(f"{title}: within {100 * NEAR:g} % of its own lowest loss are {'; '.join(ranges)}.")
        said.append(_widths(curves, groups))
    return " ".join(said)


def _widths(curves: Mapping[tuple[str, str], Mapping[float, float]], groups: Sequence[Group]) -> str:
    """Return in how many settings with delay the range of good rates is narrower than, as wide as, or wider than dp's.

    It takes settings that ran at all rates, as dp with the same optimizer did. Where all rates are good for both,
    either range may go on beyond them.
    """
    optimizers = {(group.mode, method_of(group.config)): optimizer_of(group.config) for group in groups}
    rates = {rate for curve in curves.values() for rate in curve}
    both: list[tuple[int, int]] = []
    for (mode, method), curve in curves.items():
        dp = curves.get(("dp", optimizers[mode, method]), {})
        if mode == "dp" or not curve.keys() == dp.keys() == rates:
            continue
        good = len(_good_rates(curve)), len(_good_rates(dp))
        if min(good) < len(rates):
            both.append(good)
    if not both:
        return "Too few rates ran to compare how wide these ranges are."
    narrower, wider = sum(ours < dp for ours, dp in both), sum(ours > dp for ours, dp in both)
    return (
        f"Counted in rates of the grid, {narrower} of {len(both)} settings with delay have a narrower range than dp "
        f"with the same optimizer, {len(both) - narrower - wider} one as wide, {wider} a wider one."
    )


def _near_best(curve: Mapping[float, float]) -> str:
    """Return the range of good learning rates as text."""
    if not (rates := _good_rates(curve)):
        return "none, as all diverge"
    return f"{rates[0]:g} to {rates[-1]:g}" if len(rates) > 1 else f"{rates[0]:g} alone"


def _good_rates(curve: Mapping[float, float]) -> Sequence[float]:
    """Return the learning rates around the best whose loss is near the lowest; `curve` is sorted by rate."""
    lowest = min(curve.values())
    if math.isinf(lowest):
        return ()
    rates = [*curve]
    first = last = rates.index(min(curve, key=curve.__getitem__))
    while first > 0 and curve[rates[first - 1]] <= (1 + NEAR) * lowest:
        first -= 1
    while last < len(rates) - 1 and curve[rates[last + 1]] <= (1 + NEAR) * lowest:
        last += 1
    return rates[first : last + 1]


def differences(panels: Mapping[str, Sequence[Standing]]) -> Figure | None:
    """Draw the difference of each setting from data parallelism with its 95 % interval: a panel a network.

    A difference on one seed has no interval, and is not drawn. One whose interval is unknown is a marker alone.
    Circles are studies without a verdict; diamonds are the fresh seeds that judge. The grey band is the margin of
    equivalence.
    """
    shown = {
        title: drawn
        for title, standings in panels.items()
        if (drawn := [each for each in standings if each.found and each.found.difference.n > 1])
    }
    if not shown:
        return None
    height = 1.4 + 0.3 * max(map(len, shown.values()))
    figure = Figure(figsize=(6.0 * len(shown), height), layout="constrained")
    for axis, (title, standings) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
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
    if margins := {each.study.margin for each in standings if each.study.margin is not None}:
        axis.axvspan(-max(margins), max(margins), color="grey", alpha=0.15, linewidth=0)
    axis.set_yticks(range(len(standings)), [_name(each) for each in standings], fontsize="small")
    axis.invert_yaxis()
    task = standings[0].task
    side = "right" if task.more_is_better else "left"
    minus_dp = f"{task.label}\nminus that of dp with the same optimizer"
    axis.set_xlabel(f"{minus_dp}\n[{task.difference_unit}], {side} is better", fontsize="small")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _name(standing: Standing) -> str:
    fresh = "" if standing.study.margin is None else ", fresh seeds"
    return f"{standing.group.mode}, {method_of(standing.group.config)}{fresh}"
