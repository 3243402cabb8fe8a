"""A timeline as text."""

from __future__ import annotations

from collections.abc import Iterable

from cdp_repro.schedule.actions import Op, Slot


def text_grid(slots: Iterable[Slot], lanes: int, width: int | None = None) -> str:
    """Return the timeline as text: a row a worker, a column a slot, F2v1 = forward of stage 2 with version 1.

    The last row shows the updates: U2v3 makes version 3 of stage 2. With `width` (characters) the columns are
    broken into blocks below each other.
    """
    columns = [_column(slot, lanes) for slot in slots]
    labels = ["slot", *(f"worker {lane}" for lane in range(lanes)), "update"]
    margin = max(map(len, labels))
    cell = max((len(text) for column in columns for text in column), default=0) + 1
    per_block = len(columns) if width is None else max(1, (width - margin) // cell)
    blocks = []
    for start in range(0, len(columns), max(1, per_block)):
        block = columns[start : start + per_block]
        lines = [
            f"{label:<{margin}}" + "".join(f"{column[row]:>{cell}}" for column in block)
            for row, label in enumerate(labels)
        ]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _column(slot: Slot, lanes: int) -> list[str]:
    """Return one column: the slot number, each worker's compute, the updates."""
    cells: list[list[str]] = [[] for _ in range(lanes)]
    updates = []
    for action in slot.actions:
        text = f"{action.op}{action.stage}v{action.version}"
        if action.op.is_compute:
            cells[action.micro_batch % lanes].append(text)
        elif action.op is Op.UPDATE:
            updates.append(text)
    return [str(slot.number), *map(",".join, cells), ",".join(dict.fromkeys(updates))]
