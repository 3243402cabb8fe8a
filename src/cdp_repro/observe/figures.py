"""Figures: timelines, activation memory over a timeline, and the price of a step against bandwidth."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.text import byte_unit
from cdp_repro.schedule import Action, Op, Slot
from cdp_repro.schedule.lanes import Lanes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; repeated beyond eight lanes."""

_LABELLED_LANES = 16
"""Up to this many lanes, the cells of a timeline are large enough for arrows and versions."""

_WIDE_INCHES = 6
"""A figure as wide as this has room for a long label."""
_LEGEND_INCHES = 1.25
"""What a worker takes in a legend."""

_CURVE_STYLES = (("#555555", "--"), ("#0072B2", "-"), ("#D55E00", "-."), ("#009E73", ":"))

_PRICE_LINES = ("-", "--", "-.", ":")
_PRICE_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")


def timeline_figure(timelines: Mapping[str, Sequence[Slot]], lanes: Mapping[str, Lanes], stages: int) -> Figure:
    """Draw each timeline as in the paper's figure 1: time by stage, a colour a lane, up = forward, down = backward.

    The small number in a cell is the parameter version. A cell that several lanes share is divided among them.
    `lanes` gives, by the same titles, the lane of each micro-batch.
    """
    names = max((each.names for each in lanes.values()), key=len)
    slots = max((_end(timeline, lanes[title]) for title, timeline in timelines.items()), default=0)
    cell = 0.36 if len(names) <= _LABELLED_LANES else 0.12
    figure = Figure(figsize=(1.5 + cell * slots, 1.1 + len(timelines) * (0.75 + cell * stages)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        _draw_timeline(axis, timeline, lanes[title])
        axis.set(title=title, xlim=(0, slots), ylim=(0, stages), ylabel="stage")
        axis.set_yticks([stage + 0.5 for stage in range(stages)], [str(stage) for stage in range(stages)])
        axis.set_frame_on(False)
        axis.tick_params(length=0)
    ticks = range(0, slots, max(1, slots // 16))
    axes[-1].set_xticks([slot + 0.5 for slot in ticks], [str(slot) for slot in ticks])
    between = "  " if figure.get_figwidth() > _WIDE_INCHES else "\n"
    legend = f"{between}(↑ forward, ↓ backward;{between}number: parameter version read)"
    axes[-1].set_xlabel(f"time slot{legend}" if len(names) <= _LABELLED_LANES else "time slot")
    if len(names) <= len(COLOURS):
        handles = [Rectangle((0, 0), 1, 1, color=_colour(lane), label=name) for lane, name in enumerate(names)]
        columns = min(len(names), max(1, int(figure.get_figwidth() / _LEGEND_INCHES)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _end(timeline: Sequence[Slot], lanes: Lanes) -> int:
    """Return the first slot after all computes of a timeline, some of whose slots may be missing."""
    busy = (
        lanes.busy(slot.number, action).stop for slot in timeline for action in slot.actions if action.op.is_compute
    )
    return max(busy, default=0)


def _draw_timeline(axis: Axes, timeline: Sequence[Slot], lanes: Lanes) -> None:
    """Draw a cell for every forward and backward; lanes on the same stage share its cell from top to bottom.

    With workers on clocks of their own, a cell is as wide as the slots it takes, and each lane has its own line.
    """
    cells: dict[int, list[Rectangle]] = {lane: [] for lane in range(lanes.number)}
    for slot in timeline:
        by_stage: dict[int, list[tuple[int, Action]]] = {}
        for action in slot.actions:
            if action.op.is_compute:
                by_stage.setdefault(action.stage, []).append((lanes.lane_of(action.micro_batch), action))
        for stage, users in by_stage.items():
            height = 1 / (lanes.number if lanes.durations else len(users))
            for place, (lane, action) in enumerate(users):
                bottom = stage + 1 - ((lane if lanes.durations else place) + 1) * height
                taken = lanes.busy(slot.number, action)
                cells[lane].append(Rectangle((taken.start, bottom), len(taken), height))
                if lanes.number <= _LABELLED_LANES:
                    _label(axis, action, taken.start + len(taken) / 2, bottom + height / 2, height)
    for lane, rectangles in cells.items():
        axis.add_collection(PatchCollection(rectangles, facecolor=_colour(lane), edgecolor="white", linewidth=0.8))


def _label(axis: Axes, action: Action, x: float, y: float, height: float) -> None:
    arrow = "↑" if action.op is Op.FORWARD else "↓" if action.op.passes_on else "•"
    size = 9 if height > 0.5 else max(3.5, 14 * height)
    text = f"{arrow}$_{{{action.version}}}$" if height > 0.3 else arrow
    axis.text(x, y, text, ha="center", va="center", fontsize=size)


def _colour(lane: int) -> str:
    return COLOURS[lane % len(COLOURS)]


def memory_figure(curves: Mapping[str, Mapping[int, int]], title: str) -> Figure:
    """Draw live activation bytes, summed over devices, against the time slot: curve name -> slot -> bytes."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    peak = max((max(curve.values()) for curve in curves.values() if curve), default=1)
    unit, name = byte_unit(peak)
    for number, (label, curve) in enumerate(curves.items()):
        colour, line = _CURVE_STYLES[number % len(_CURVE_STYLES)]
        values = [bytes_ / unit for bytes_ in curve.values()]
        axis.plot(list(curve), values, line, color=colour, label=f"{label} (peak {max(values, default=0):.4g} {name})")
    axis.set(title=title, xlabel="time slot", ylabel=f"live activations [{name}]", ylim=(0, 1.08 * peak / unit))
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def price_figure(curves: Mapping[str, Mapping[float, float]], title: str) -> Figure:
    """Draw seconds of a training step against bandwidth: curve name -> multiple of the given bandwidths -> seconds.

    The name of a curve begins with its mode, which gives its line, and ends with its placement, which gives its colour
    and marker.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    modes = list(dict.fromkeys(label.split()[0] for label in curves))
    places = list(dict.fromkeys(label.split()[-1] for label in curves))
    for label, curve in curves.items():
        mode, place = modes.index(label.split()[0]), places.index(label.split()[-1])
        axis.plot(
            list(curve), list(curve.values()), linestyle=_PRICE_LINES[mode % len(_PRICE_LINES)],
            marker=_PRICE_MARKERS[place % len(_PRICE_MARKERS)], markersize=4, color=_colour(place), label=label,
        )  # fmt: skip
    axis.set(title=title, xscale="log", yscale="log", ylabel="training step [s]")
    axis.set_xlabel("bandwidth of all links, over that of the cluster")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper", fontsize="small", handlelength=4)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the form that the suffix of `path` names (.svg or .png), the same bytes each time."""
    form, drawn = path.suffix.removeprefix("."), io.BytesIO()
    with rc_context({"svg.hashsalt": "cdp-repro"}):
        figure.savefig(drawn, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    replace_file(path, drawn.getvalue())
