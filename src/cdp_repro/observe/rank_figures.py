"""Timelines of ranks, as the literature on pipelines draws them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from cdp_repro.observe.figures import COLOURS
from cdp_repro.schedule import Op, Slot

_KINDS = _FORWARD, _BACKWARD, _APART = ("forward", 1.0), ("backward", 0.55), ("gradients of weights, apart", 0.25)
"""Kinds of compute, with the opacity of each."""

SHOWN_SLOTS = 64
"""The most slots of a timeline that are drawn."""


def rank_timelines(timelines: Mapping[str, Sequence[Slot]], ranks: int) -> Figure:
    """Draw each timeline: time by rank, a colour and a number per micro-batch; forwards opaque, backwards pale."""
    shown = min(SHOWN_SLOTS, max(slot.number + 1 for slots in timelines.values() for slot in slots if slot.actions))
    figure = Figure(figsize=(1.6 + 0.2 * shown, 0.6 + len(timelines) * (0.5 + 0.2 * ranks)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, slots) in zip(axes, timelines.items(), strict=True):
        _draw(axis, slots, shown)
        axis.set_title(title, loc="left", fontsize="small")
        axis.set(xlim=(0, shown), ylim=(ranks, 0), yticks=[])
        axis.set_ylabel("rank", fontsize="x-small")
        axis.tick_params(length=0, labelsize="x-small")
    axes[-1].set_xlabel("time slot", fontsize="small")
    figure.legend(
        handles=[Patch(color=COLOURS[0], alpha=alpha, label=name) for name, alpha in _KINDS],
        loc="outside lower center", ncols=3, frameon=False, fontsize="small",
    )  # fmt: skip
    return figure


def _draw(axis: Axes, slots: Sequence[Slot], shown: int) -> None:
    cells: dict[tuple[str, float], list[Rectangle]] = defaultdict(list)
    for slot in slots[:shown]:
        for action in slot.actions:
            if action.op.is_compute:
                colour = COLOURS[action.micro_batch % len(COLOURS)]
                cells[colour, _opacity(action.op)].append(Rectangle((slot.number, action.rank), 1, 1))
                where = slot.number + 0.5, action.rank + 0.5
                label = axis.text(*where, str(action.micro_batch), ha="center", va="center", fontsize=5)
                label.set_in_layout(False)  # labels are inside the axes
    for (colour, alpha), rectangles in cells.items():
        axis.add_collection(PatchCollection(rectangles, facecolor=colour, alpha=alpha, edgecolor="white"))


def _opacity(op: Op) -> float:
    _, opacity = _FORWARD if op is Op.FORWARD else _BACKWARD if op.passes_on else _APART
    return opacity
