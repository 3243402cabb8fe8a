"""Schedules for people and tools: text grid, CSV, and Chrome/Perfetto trace."""

from __future__ import annotations

import csv
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from cdp_repro.schedule.actions import Action, MessageKey, Op, Slot, consumed
from cdp_repro.schedule.placement import Placement
from cdp_repro.schedule.trace import SlotRecord, Trace


def text_grid(slots: Iterable[Slot], workers: int, width: int | None = None) -> str:
    """Return the timeline as text: a row a worker, a column a slot, F2v1 = forward of stage 2 with version 1.

    The last row shows the updates: U2v3 makes version 3 of stage 2. With `width` (characters) the columns are
    broken into blocks below each other.
    """
    columns = [_column(slot, workers) for slot in slots]
    labels = ["slot", *(f"worker {worker}" for worker in range(workers)), "update"]
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


def _column(slot: Slot, workers: int) -> list[str]:
    """Return one column: the slot number, each worker's compute, the updates."""
    cells = [""] * workers
    updates = []
    for action in slot.actions:
        version = "" if action.version is None else f"v{action.version}"
        text = f"{action.op}{action.stage}{version}"
        if action.op.is_compute and action.micro_batch is not None:
            cells[action.micro_batch % workers] = text
        elif action.op is Op.UPDATE:
            updates.append(text)
    return [str(slot.number), *cells, ",".join(dict.fromkeys(updates))]


def write_actions_csv(trace: Trace, file: IO[str]) -> None:
    """Write one row an action: slot, rank, worker, step, text form."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["slot", "rank", "step", "worker", "action"])
    for record in trace.records:
        for action in record.actions:
            step, worker = _step_and_worker(action, trace.workers)
            writer.writerow([record.slot, record.rank, step, worker, action])


def write_comms_csv(trace: Trace, file: IO[str]) -> None:
    """Write one row a message: slot, source and destination rank, kind, stage, bytes."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["slot", "source", "destination", "kind", "stage", "bytes"])
    writer.writerows((m.slot, m.source, m.destination, m.kind, m.stage, m.bytes) for m in trace.messages)


def write_memory_csv(trace: Trace, file: IO[str], parameter_bytes: Sequence[int], placement: Placement) -> None:
    """Write one row a slot and rank: live activation bytes, parameter bytes, live versions of each stage.

    `parameter_bytes` are those of one version of each stage.
    """
    writer = csv.writer(file, lineterminator="\n")
    stages = [f"versions_stage_{stage}" for stage in range(trace.stages)]
    writer.writerow(["slot", "rank", "activation_bytes", "parameter_bytes", *stages])
    for record in trace.records:
        live = placement.live_bytes(record.rank, record.versions, parameter_bytes)
        writer.writerow([record.slot, record.rank, record.activation_bytes, live, *record.versions])


def perfetto(trace: Trace) -> dict[str, Any]:
    """Return the trace in Chrome's trace-event format (open it in ui.perfetto.dev or chrome://tracing).

    A process is a rank, a thread a worker; arrows lead from each message's SEND to what waited for it; counters show
    live activation bytes, live versions and the newest version of each stage. Times are microseconds.
    """
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(trace), *_events(trace), *_flows(trace)]}


def write_perfetto(trace: Trace, file: IO[str]) -> None:
    """Write `perfetto(trace)` as JSON."""
    json.dump(perfetto(trace), file)


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in sorted({record.rank for record in trace.records}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for worker in range(trace.workers):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": worker, "args": {"name": f"worker {worker}"}}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": trace.workers, "args": {"name": "state, messages"}}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    newest: dict[tuple[int, int], int] = {}
    for record in trace.records:
        for action, (start, end) in zip(record.actions, record.spans, strict=True):
            yield {
                "ph": "X",
                "name": str(action),
                "cat": action.op.name.lower(),
                "pid": record.rank,
                "tid": _thread(action, trace.workers),
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"slot": record.slot},
            }
            if action.op is Op.UPDATE and action.version is not None:
                newest[record.rank, action.stage] = action.version
                own = {f"stage {stage}": version for (rank, stage), version in newest.items() if rank == record.rank}
                yield _counter("newest version", record.rank, end, own)
        start = record.spans[0][0]
        yield _counter("live activation bytes", record.rank, start, {"bytes": record.activation_bytes})
        live = {f"stage {stage}": number for stage, number in enumerate(record.versions)}
        yield _counter("live versions", record.rank, start, live)


def _counter(name: str, rank: int, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "ts": seconds * 1e6, "args": values}


def _flows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield both ends of an arrow for each message that was waited for in the trace."""
    sent: dict[tuple[int, MessageKey], deque[dict[str, Any]]] = defaultdict(deque)
    sizes = {(m.slot, m.source, m.destination, *m.key): m.bytes for m in trace.messages}
    for record, action, start, end in _spans(trace):
        if action.op is not Op.SEND:
            continue
        assert action.peer is not None
        size = sizes.get((record.slot, record.rank, action.peer, *action.message))
        if size is not None:
            end_of_arrow = _arrow_end("s", action, record.rank, trace, (start + end) / 2, 0)
            sent[action.peer, action.message].append({**end_of_arrow, "args": {"bytes": size}})
    number = 0
    for record, action, start, end in _spans(trace):
        for key in consumed(action, trace.workers):
            if sent[record.rank, key]:
                number += 1
                yield {**sent[record.rank, key].popleft(), "id": number}
                yield {**_arrow_end("f", action, record.rank, trace, (start + end) / 2, number), "bp": "e"}


def _spans(trace: Trace) -> Iterator[tuple[SlotRecord, Action, float, float]]:
    """Yield every action with its record, start and end."""
    for record in trace.records:
        for action, (start, end) in zip(record.actions, record.spans, strict=True):
            yield record, action, start, end


def _arrow_end(kind: str, action: Action, rank: int, trace: Trace, at: float, number: int) -> dict[str, Any]:
    thread = _thread(action, trace.workers)
    return {"ph": kind, "name": "message", "cat": "message", "pid": rank, "tid": thread, "ts": at * 1e6, "id": number}


def _thread(action: Action, workers: int) -> int:
    """Return the track of an action: its worker's, or the last one for what is no compute."""
    if action.op.is_compute and action.micro_batch is not None:
        return action.micro_batch % workers
    return workers


def _step_and_worker(action: Action, workers: int) -> tuple[int | None, int | None]:
    """Return the training step and the worker of a compute action; of an update only the step, of a free neither."""
    if action.micro_batch is not None:
        return divmod(action.micro_batch, workers)
    return (action.version - 1 if action.op == "U" and action.version is not None else None), None
