"""Figures for people who would rather look than read: the timeline and the activation memory over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdp_repro.schedule import Op, Slot

WORKER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; repeated beyond eight workers."""

_CURVE_STYLES = (("#555555", "--"), ("#0072B2", "-"), ("#D55E00", "-."), ("#009E73", ":"))
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def timeline_figure(timelines: Mapping[str, Sequence[Slot]], workers: int, stages: int) -> Figure:
    """Draw each timeline as in the paper's figure 1: time by stage, a colour a worker, up = forward, down = backward.

    The small number in a cell is the parameter version. A cell that several workers share is divided among them.
    """
    slots = max(len(slots) for slots in timelines.values())
    figure = Figure(figsize=(1.5 + 0.36 * slots, 1.1 + len(timelines) * (0.75 + 0.36 * stages)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        for slot in timeline:
            _draw_slot(axis, slot, workers)
        axis.set(title=title, xlim=(0, slots), ylim=(0, stages), ylabel="stage")
        axis.set_yticks([stage + 0.5 for stage in range(stages)], [str(stage) for stage in range(stages)])
        axis.set_frame_on(False)
        axis.tick_params(length=0)
    ticks = range(0, slots, max(1, slots // 16))
    axes[-1].set_xticks([slot + 0.5 for slot in ticks], [str(slot) for slot in ticks])
    axes[-1].set_xlabel("time slot  (↑ forward, ↓ backward; number: parameter version read)")
    handles = [axes[0].bar(0, 0, color=_colour(worker), label=f"worker {worker}") for worker in range(workers)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(workers, 8), frameon=False)
    return figure


def _draw_slot(axis: Axes, slot: Slot, workers: int) -> None:
    """Draw the compute of one slot; workers on the same stage share its cell from top to bottom."""
    by_stage: dict[int, list[tuple[int, str, int | None]]] = {}
    for action in slot.actions:
        if action.micro_batch is not None:
            arrow = "↑" if action.op is Op.FORWARD else "↓"
            by_stage.setdefault(action.stage, []).append((action.micro_batch % workers, arrow, action.version))
    for stage, users in by_stage.items():
        height = 1 / len(users)
        for place, (worker, arrow, version) in enumerate(sorted(users)):
            bottom = stage + 1 - (place + 1) * height
            axis.bar(slot.number + 0.5, height, 1, bottom, color=_colour(worker), edgecolor="white", linewidth=0.8)
            size = 9 if height > 0.5 else max(3.5, 14 * height)
            label = f"{arrow}$_{{{version}}}$" if height > 0.3 else arrow
            axis.text(slot.number + 0.5, bottom + height / 2, label, ha="center", va="center", fontsize=size)


def _colour(worker: int) -> str:
    return WORKER_COLOURS[worker % len(WORKER_COLOURS)]


def memory_figure(curves: Mapping[str, Mapping[int, int]], title: str) -> Figure:
    """Draw live activation bytes, summed over devices, against the time slot: curve name -> slot -> bytes."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    peak = max((max(curve.values()) for curve in curves.values() if curve), default=1)
    unit, name = next((unit, name) for unit, name in _BYTE_UNITS if peak >= unit or unit == 1)
    for number, (label, curve) in enumerate(curves.items()):
        colour, line = _CURVE_STYLES[number % len(_CURVE_STYLES)]
        values = [bytes_ / unit for bytes_ in curve.values()]
        axis.plot(list(curve), values, line, color=colour, label=f"{label} (peak {max(values, default=0):.4g} {name})")
    axis.set(title=title, xlabel="time slot", ylabel=f"live activations [{name}]", ylim=(0, 1.08 * peak / unit))
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as the suffix of `path` says (.svg or .png), the same bytes each time."""
    with rc_context({"svg.hashsalt": "cdp-repro"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def format_bytes(number: float) -> str:
    """Return a number of bytes for people, e.g. 12.3 MiB."""
    unit, name = next((unit, name) for unit, name in _BYTE_UNITS if number >= unit or unit == 1)
    return f"{number / unit:.4g} {name}"
