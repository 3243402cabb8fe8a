"""A trace in Chrome's trace-event format, which Perfetto shows."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import IO, Any

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.values import Value
from cdp_repro.trace.record import SlotRecord, Trace


def perfetto(trace: Trace) -> dict[str, Any]:
    """Return the trace in Chrome's trace-event format (open it in ui.perfetto.dev or chrome://tracing).

    A process is a rank, and a thread a lane. Arrows lead from each message's SEND to the action that waited for it.
    Counters show the most activation bytes of a slot, and after a rank's last action what it keeps; the versions that
    are alive at the end of a slot; the newest version of each stage after each update. Times are microseconds.
    """
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(trace), *_events(trace), *_flows(trace)]}


def write_perfetto(trace: Trace, file: IO[str]) -> None:
    """Write `perfetto(trace)` as JSON."""
    json.dump(perfetto(trace), file)


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in sorted({record.rank for record in trace.records}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        tracks = [*trace.lanes.names, "state, messages"]
        for thread, name in enumerate(tracks):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    newest: dict[tuple[int, int], int] = {}
    for record in trace.records:
        for action, (start, end) in zip(record.actions, record.spans, strict=True):
            yield {
                "ph": "X",
                "name": action.label,
                "cat": action.op.name.lower(),
                "pid": record.rank,
                "tid": _thread(action, trace.lanes),
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"slot": record.slot},
            }
            if action.op is Op.UPDATE:
                newest[record.rank, action.stage] = action.version
                own = {f"stage {stage}": version for (rank, stage), version in newest.items() if rank == record.rank}
                yield _counter("newest version", record.rank, end, own)
        start, end = record.spans[0][0], record.spans[-1][1]
        for at, nbytes in ((start, record.activation_peak_bytes), (end, record.activation_bytes_at_end)):
            yield _counter("activation bytes (peak of the slot)", record.rank, at, {"bytes": nbytes})
        live = {f"stage {stage}": number for stage, number in enumerate(record.versions)}
        yield _counter("live versions", record.rank, start, live)


def _counter(name: str, rank: int, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "ts": seconds * 1e6, "args": values}


def _flows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield both ends of an arrow for each message that an action of the trace waited for.

    It leads from the start of the SEND to the end of the action: an action begins before its message has come.
    """
    arrows: dict[tuple[int, Value], deque[tuple[int, dict[str, Any]]]] = defaultdict(deque)
    sizes: dict[tuple[object, ...], int] = {(m.slot, m.source, m.destination, m.value): m.bytes for m in trace.messages}
    for record, action, start, _ in _spans(trace):
        key = record.slot, record.rank, action.peer, action.value
        if action.op is Op.SEND and action.value is not None and key in sizes:
            end_of_arrow = _arrow_end("s", action, trace, start)
            arrows[action.peer, action.value].append((record.slot, {**end_of_arrow, "args": {"bytes": sizes[key]}}))
    number = 0
    for record, action, _, end in _spans(trace):
        for value in action.reads:
            sent = arrows.get((record.rank, value))
            if sent and sent[0][0] <= record.slot:  # else it is there already: buffers have no version
                number += 1
                yield {**sent.popleft()[1], "id": number}
                yield {**_arrow_end("f", action, trace, end), "id": number, "bp": "e"}


def _spans(trace: Trace) -> Iterator[tuple[SlotRecord, Action, float, float]]:
    """Yield every action with its record, start and end."""
    for record in trace.records:
        for action, (start, end) in zip(record.actions, record.spans, strict=True):
            yield record, action, start, end


def _arrow_end(kind: str, action: Action, trace: Trace, at: float) -> dict[str, Any]:
    thread = _thread(action, trace.lanes)
    return {"ph": kind, "name": "message", "cat": "message", "pid": action.rank, "tid": thread, "ts": at * 1e6}


def _thread(action: Action, lanes: Lanes) -> int:
    """Return the track of an action: its lane for compute, else the last track."""
    return lanes.lane_of(action.micro_batch) if action.op.is_compute else lanes.number
