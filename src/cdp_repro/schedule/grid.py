"""A timeline as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.lanes import Lanes


def text_grid(slots: Iterable[Slot], lanes: Lanes, width: int | None = None) -> str:
    """Return the timeline as text: a row per lane, a column per slot, F2v1 = forward of stage 2 with version 1.

    `-` marks the other slots of a longer compute. The last row shows the updates: U2v3 makes version 3 of stage 2.
    With `width` (characters) the columns are broken into blocks, one below the other.
    """
    columns = _columns(list(slots), lanes)
    labels = ["slot", *lanes.names, "update"]
    margin = max(map(len, labels))
    cell = max((len(text) for column in columns for text in column), default=0) + 1
    per_block = max(1, len(columns) if width is None else (width - margin) // cell)
    blocks = []
    for start in range(0, len(columns), per_block):
        block = columns[start : start + per_block]
        lines = [
            f"{label:<{margin}}" + "".join(f"{column[row]:>{cell}}" for column in block)
            for row, label in enumerate(labels)
        ]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _columns(slots: Sequence[Slot], lanes: Lanes) -> list[list[str]]:
    """Return a column per slot: its number, each lane's compute, the updates; `-` where a longer compute goes on."""
    computes: dict[tuple[int, int], list[str]] = defaultdict(list)
    goes_on: set[tuple[int, int]] = set()
    for slot in slots:
        for action in slot.actions:
            if action.op.is_compute:
                lane = lanes.lane_of(action.micro_batch)
                computes[slot.number, lane].append(_text(action))
                goes_on |= {(number, lane) for number in lanes.busy(slot.number, action)}
    found = []
    for slot in slots:
        places = [(slot.number, lane) for lane in range(lanes.number)]
        cells = [",".join(computes[place]) if place in computes else "-" * (place in goes_on) for place in places]
        updates = dict.fromkeys(_text(action) for action in slot.actions if action.op is Op.UPDATE)
        found.append([str(slot.number), *cells, ",".join(updates)])
    return found


def _text(action: Action) -> str:
    return f"{action.op}{action.stage}v{action.version}"
