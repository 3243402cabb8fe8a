"""The figures of the report. Data parallelism is grey and dashed everywhere, so that it also stands out in print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cdp_repro.config.schema import is_evaluated
from cdp_repro.config.task import IMAGES
from cdp_repro.observe.figures import timeline_figure
from cdp_repro.observe.text import byte_unit
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.memory_reduction import curve, theory
from cdp_repro.report.accuracy import Comparison
from cdp_repro.report.activation_memory import CUTS, ORDERS, SHOWN_WORKERS, Case, profiles
from cdp_repro.report.groups import Group, data_parallel
from cdp_repro.schedule import Schedule
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.cost_settings import PLACEMENT_NAMES

_MODES = {"dp": ("#555555", "--"), "cdp_v1": ("#D55E00", "-."), "cdp_v2": ("#0072B2", "-")}
_OTHERS = (
    ("#009E73", ":"), ("#CC79A7", (0, (3, 1, 1, 1))), ("#E69F00", (0, (1, 1))), ("#56B4E9", (0, (5, 1))),
    ("#882255", "--"), ("#000000", "-."),
)  # fmt: skip
_ORDER_NAMES = {"paper": "paper order", "backward_first": "backward first"}


def style(mode: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return colour and line of a mode; those beyond the paper's are told apart by their place in `others`.

    Broken lines lie above unbroken ones, so that both are seen where they coincide.
    """
    line: Any
    if mode in _MODES:
        colour, line = _MODES[mode]
    else:
        again, place = divmod(list(others).index(mode), len(_OTHERS))  # colours come again with other lines
        colour, line = _OTHERS[place][0], _OTHERS[(place + again) % len(_OTHERS)][1]
    return {"color": colour, "linestyle": line, "zorder": 2 if line == "-" else 2.1}


def not_of_the_paper(modes: Sequence[str]) -> list[str]:
    """Return the modes, or names of settings, that `style` tells apart by their place among them."""
    return [mode for mode in modes if mode not in _MODES]


def plain_axes(axis: Axes) -> None:
    """Give a panel a faint horizontal grid, and hide its top and right borders."""
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


_REMEDIES = {
    "cut by FLOPs": ("flops", "paper", "#D55E00"),
    "cut by activation bytes": ("activations", "paper", "#0072B2"),
    "and backward first": ("activations", "backward_first", "#56B4E9"),
}
"""By name: the cut, the slot order, and the colour of a bar."""


def peak_bars(cases: Sequence[Case]) -> Figure:
    """Draw CDP's executed peak over DP's with `SHOWN_WORKERS` workers: a group per network, a bar per remedy."""
    found = {(case.model, case.partition): case.ratios for case in cases if case.workers == SHOWN_WORKERS}
    models = [model for model in profiles(cases) if all((model, cut) in found for cut in CUTS)]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    for number, (name, (cut, order, colour)) in enumerate(_REMEDIES.items()):
        heights = [found[model, cut][order] for model in models]
        bars = axis.bar([place + 0.27 * (number - 1) for place in range(len(models))], heights, 0.25, color=colour)
        bars.set_label(name)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axis.axhline(theory(SHOWN_WORKERS), color="black", linestyle=":", linewidth=0.9, label="equal stages, (N+1)/2N")
    axis.axhline(1, color=_MODES["dp"][0], linestyle="--", linewidth=0.9, label="data parallelism")
    axis.set(ylabel="activation peak, CDP-v2 / DP", ylim=(0, 1.1))
    axis.set_xticks(range(len(models)), models)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize="small")
    plain_axes(axis)
    return figure


def memory_curves(cases: Sequence[Case]) -> Figure:
    """Draw executed live activation bytes by slot: a row per network, a column per number of workers and cut."""
    models = list(dict.fromkeys(case.model for case in cases))
    columns = sorted({(case.workers, case.partition) for case in cases if case.partition in CUTS}, key=_column_order)
    figure = Figure(figsize=(3.1 * len(columns) + 0.4, 2.2 * len(models) + 0.7), layout="constrained")
    axes = figure.subplots(len(models), len(columns), squeeze=False)
    by_place = {(case.model, case.workers, case.partition): case for case in cases}
    for line, model in enumerate(models):
        for column, (workers, cut) in enumerate(columns):
            axis = axes[line][column]
            case = by_place.get((model, workers, cut))
            if case is None:
                axis.set_visible(False)
                continue
            _draw_curves(axis, case)
            axis.set_title(f"{model}, N = {workers}, cut by {cut}", fontsize=9)
            if line == len(models) - 1:
                axis.set_xlabel("time slot")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _column_order(column: tuple[int, str]) -> tuple[int, int]:
    return column[0], CUTS.index(column[1])


def _draw_curves(axis: Axes, case: Case) -> None:
    """Draw the first two training steps and the drain, with the line that equal stages would give."""
    curves: dict[str, tuple[Group, dict[str, Any]]] = {
        "DP": (case.dp, style("dp")),
        "CDP-v2, paper order": (case.cdp["paper"], style("cdp_v2")),
        "CDP-v2, backward first": (case.cdp["backward_first"], style("cdp_v1")),
    }
    peak = max(max(group.rows[0].activation_bytes) for group, _ in curves.values())
    unit, name = byte_unit(peak)
    for label, (group, look) in curves.items():
        live = group.rows[0].activation_bytes[: 6 * case.workers]
        axis.step(range(len(live)), [each / unit for each in live], where="mid", label=label, linewidth=1.2, **look)
    dp_peak = max(case.dp.rows[0].activation_bytes)
    axis.axhline(
        theory(case.workers) * dp_peak / unit,
        color="black",
        linestyle=":",
        linewidth=0.9,
        label="(N+1)/2N of DP's peak",
    )
    axis.set(ylabel=f"live activations [{name}]", ylim=(0, 1.05 * peak / unit))
    plain_axes(axis)


def reduction_curves(cases: Sequence[Case]) -> Figure:
    """Draw CDP's peak over DP's against N, simulated from each network's measured profile, with executed points."""
    found = profiles(cases)
    figure = Figure(figsize=(3.3 * max(1, len(found)) + 0.4, 3.4), layout="constrained")
    axes = figure.subplots(1, max(1, len(found)), squeeze=False, sharey=True)[0]
    for axis, (model, blocks) in zip(axes, found.items(), strict=False):
        _draw_reduction(axis, model, blocks, [case for case in cases if case.model == model])
    axes[0].set_ylabel("activation peak, CDP-v2 / DP")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


_CUT_LOOKS = {"flops": ("#D55E00", "s"), "activations": ("#0072B2", "o"), "blocks": ("#009E73", "D")}


def _draw_reduction(axis: Axes, model: str, blocks: StageCosts, cases: Sequence[Case]) -> None:
    for cut in CUTS:
        for order in ORDERS:
            points = curve(blocks, cut, order)
            line = "-" if order == "paper" else "-."
            label = f"cut by {cut}, {_ORDER_NAMES[order]}"
            axis.plot(list(points), list(points.values()), line, color=_CUT_LOOKS[cut][0], label=label, linewidth=1.2)
    for case in cases:
        colour, marker = _CUT_LOOKS[case.partition]
        for order, ratio in case.ratios.items():
            face = colour if order == "paper" else "white"
            axis.plot(case.workers, ratio, marker, color=colour, markerfacecolor=face, markersize=5)
    workers = range(2, 65)
    axis.plot(workers, [theory(n) for n in workers], ":", color="black", linewidth=0.9, label="equal stages, (N+1)/2N")
    axis.axvline(blocks.stages, color="#999999", linewidth=0.7)
    axis.set(title=f"{model} ({blocks.stages} blocks)", xlabel="workers N", xscale="log", ylim=(0.4, 1.0))
    axis.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
    axis.minorticks_off()
    plain_axes(axis)


def timelines(groups: Sequence[Group], workers: int) -> Figure | None:
    """Draw the timelines of DP, CDP-v1 and CDP-v2 from the programs that ran on one device; None without runs."""
    names = {"dp": "DP", "cdp_v1": "CDP-v1", "cdp_v2": "CDP-v2"}
    ran = {
        group.mode: group.rows[0]
        for group in groups
        if group.config["placement.name"] == "single_device" and group.config["workers"] == workers
        and group.config["baseline"] is None and group.rows[0].actions
    }  # fmt: skip
    slots = {title: ran[mode].slots()[: 6 * workers - 2] for mode, title in names.items() if mode in ran}
    return timeline_figure(slots, dict.fromkeys(slots, Lanes(workers)), workers) if len(slots) == len(names) else None


def communication(groups: Sequence[Group], workers: int) -> Figure | None:
    """Draw bytes sent in each slot of a training step, executed, for DP and CDP on each placement."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for group in groups:
        config = group.config
        by_library = config["baseline"] is not None or config["collectives"]
        is_ours = not by_library and config["pipeline_schedule"] == "one_f_one_b"
        if config["workers"] == workers and is_ours and group.rows[0].sent_bytes:
            found.setdefault(config["placement.name"], {})[group.mode] = group.rows[0].sent_bytes
    if not found:
        return None
    figure = Figure(figsize=(2.9 * len(found) + 0.4, 3.0), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, placement in zip(axes, [name for name in PLACEMENT_NAMES if name in found], strict=True):
        for mode, sent in found[placement].items():
            slots = Schedule.build(mode, workers, placement=placement).slots_per_step
            step = [each / 1024 for each in [*sent, *[0] * 3 * slots][2 * slots : 3 * slots]]
            axis.step(range(slots), step, where="mid", label=mode, linewidth=1.3, **style(mode))
        axis.set(title=f"{PLACEMENT_NAMES[placement]}, N = {workers}", xlabel="slot of a training step", ylim=(0, None))
        plain_axes(axis)
    axes[0].set_ylabel("sent by all ranks [KiB]")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def accuracy_curves(found: Sequence[Comparison]) -> Figure | None:
    """Draw the deciding number against the epoch, as mean and range over seeds.

    Each study has a panel for each of its tasks. A panel without data parallelism shows that of a
    study with as many epochs.
    """
    panels = list(dict.fromkeys((each.study, each.task) for each in found))
    if not panels:
        return None
    figure = Figure(figsize=(4.2 * len(panels) + 0.4, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (study, task) in zip(axes, panels, strict=True):
        members = [each.group for each in found if (each.study, each.task) == (study, task)]
        if all(group.mode != "dp" for group in members):
            alike = [each.group for each in found if each.group.config["epochs"] == members[0].config["epochs"]]
            reference = data_parallel(alike, like=members[0])
            members = [reference, *members] if reference else members
        names = _names(members)
        others = not_of_the_paper(names)
        for name, group in zip(names, members, strict=True):
            _draw_accuracy(axis, name, group, task.metric, others)
        axis.set(title=study, xlabel="epoch", ylabel=task.label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        plain_axes(axis)
    return figure


def _names(groups: Sequence[Group]) -> list[str]:
    """Return the modes, with the learning rate where a mode ran with several."""
    modes = [group.mode for group in groups]
    return [
        f"{group.mode}, lr {group.config['optim.lr']:g}" if modes.count(group.mode) > 1 else group.mode
        for group in groups
    ]


def _draw_accuracy(axis: Axes, name: str, group: Group, metric: str, others: Sequence[str]) -> None:
    runs = [row.epochs[metric] for row in group.rows]
    last, every = group.config["epochs"], group.config.get("evaluate_every_epochs", 1)
    evaluated = [epoch for epoch in range(1, last + 1) if is_evaluated(epoch, every, last)]
    epochs = evaluated[: min(map(len, runs))]  # a run that has diverged has fewer
    columns = list(zip(*(run[: len(epochs)] for run in runs), strict=True))
    look = style(name, others)
    mean = [statistics.fmean(column) for column in columns]
    axis.plot(epochs, mean, label=f"{name} (n = {len(runs)})", linewidth=1.3, **look)
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    axis.fill_between(epochs, low, high, color=look["color"], alpha=0.15, linewidth=0)


_SHARED_RATE, _OWN_RATE = "delay of all, learning rate of dp", "delay of all, learning rate of its own"
_DELAY_STYLES: dict[str, dict[str, Any]] = {
    _SHARED_RATE: {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    _OWN_RATE: {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "cdp_v2": {"color": "#D55E00", "marker": "s", "linestyle": ""},
}


def staleness(found: Sequence[Comparison]) -> Figure | None:
    """Draw top-1 at the end against the largest delay, a point per seed, for the studies of longer delays."""
    points = _accuracy_by_delay(found)
    if not points:
        return None
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axis = figure.subplots()
    for name, look in _DELAY_STYLES.items():
        if name not in points:
            continue
        by_delay = dict(sorted(points[name].items()))
        axis.plot(list(by_delay), [statistics.fmean(values) for values in by_delay.values()], label=name, **look)
        for delay, values in by_delay.items():
            axis.plot([delay] * len(values), values, ".", color=look["color"], alpha=0.6, markersize=4)
    axis.set(xlabel="delay of the parameters [training steps]", ylabel=IMAGES.label)
    axis.set_xticks(sorted({delay for by_delay in points.values() for delay in by_delay}))
    axis.legend(frameon=False)
    plain_axes(axis)
    return figure


def staleness_caption(found: Sequence[Comparison]) -> str:
    """Return the caption of the figure of `staleness`."""
    lines = {name: dict(sorted(by_delay.items())) for name, by_delay in _accuracy_by_delay(found).items()}
    ends = {name: statistics.fmean([*by_delay.values()][-1]) for name, by_delay in lines.items()}
    said = ["Test top-1 at the end against the delay; small points are single seeds."]
    if 0 in (shared := lines.get(_SHARED_RATE, {})) and len(shared) > 1:
        text = f"From {statistics.fmean(shared[0]):.1f} % without delay, {max(shared)} steps lead to "
        text += f"{ends[_SHARED_RATE]:.1f} % with the learning rate of data parallelism"
        if max(lines.get(_OWN_RATE, (0,))) == max(shared):
            text += f", to {ends[_OWN_RATE]:.1f} % with one that short runs chose"
        said.append(f"{text}.")
    return " ".join(said)


def _accuracy_by_delay(found: Sequence[Comparison]) -> dict[str, dict[int, list[float]]]:
    """Return top-1 of all seeds by line and delay, for the studies of staleness and those that they refer to."""
    studies = {each.study for each in found if each.study in STUDIES and each.group.mode.startswith("staleness")}
    studies |= {reference for name in studies if (reference := STUDIES[name].reference)}
    groups = [each.group for each in found if each.study in studies]
    rates = {group.config["optim.lr"] for group in groups if group.mode == "dp"}
    points: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        is_shared = group.config["optim.lr"] in rates
        line = "cdp_v2" if group.mode == "cdp_v2" else _SHARED_RATE if is_shared else _OWN_RATE
        longest = max(delay for row in group.rows[0].summary["staleness"] for delay in row)
        points.setdefault(line, {}).setdefault(longest, []).extend(group.values(IMAGES.metric))
    return points
