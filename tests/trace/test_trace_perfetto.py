"""A trace as Perfetto shows it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule
from cdp_repro.trace import perfetto, write_perfetto


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", [[3, 2], [1, 1]]], ids=str)
def test_perfetto_has_one_complete_event_an_action(mode):
    n = 2 if isinstance(mode, list) else 3
    program = Program(Schedule.build(mode, n))
    trace = simulate(program, StageCosts.equal(n, 100, parameter_bytes=10), 3)
    file = io.StringIO()
    write_perfetto(trace, file)
    loaded = json.loads(file.getvalue())
    assert loaded == json.loads(json.dumps(perfetto(trace)))
    events = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    actions = [(slot.number, action) for slot in program.slots(3) for action in slot.actions]
    assert [(event["args"]["slot"], event["name"]) for event in events] == [(s, a.label) for s, a in actions]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in loaded["traceEvents"]
        if event["name"] == "thread_name"
    }
    for event, (number, action) in zip(events, actions, strict=True):
        assert event["dur"] >= 0 and event["ts"] == number * 1e6
        worker = action.micro_batch % n if action.op.is_compute else None
        assert named[event["pid"], event["tid"]] == ("state, messages" if worker is None else f"worker {worker}")
    named_bytes = [event for event in loaded["traceEvents"] if event["name"] == "activation bytes (peak of the slot)"]
    counters = {event["ts"]: event["args"]["bytes"] for event in named_bytes}
    last = trace.records[-1]
    kept = {last.spans[-1][1] * 1e6: last.activation_bytes_at_end}
    assert counters == {slot * 1e6: live for slot, live in trace.activation_bytes_per_slot.items()} | kept


@pytest.mark.parametrize(("mode", "placement"), [("cdp_v2", "replicated"), ("cdp_v1", "pipeline"), ("dp", "zero")])
def test_arrows_lead_from_each_send_to_what_waits_for_it(mode, placement):
    trace = simulate(Program(Schedule.build(mode, 3, placement=placement)), StageCosts.equal(3), 3)
    events = perfetto(trace)["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(trace.messages), "every message is waited for"
    pairs = sorted((starts[number]["pid"], ends[number]["pid"]) for number in starts)
    assert pairs == sorted((message.source, message.destination) for message in trace.messages)
    assert {event["args"]["bytes"] for event in starts.values()} == {1}
    newest = [event for event in events if event["ph"] == "C" and event["name"] == "newest version"]
    assert {max(event["args"].values()) for event in newest} == {1, 2, 3}


def test_no_arrow_leads_back_in_time_where_actions_wait_for_their_messages():
    """As in a run: an action begins before its message has come, and ends later."""
    trace = simulate(Program(Schedule.build("cdp_v2", 3, placement="pipeline")), StageCosts.equal(3), 3)
    early = [
        replace(record, spans=tuple((begin - 0.9, end) for begin, end in record.spans)) if record.rank == 2 else record
        for record in trace.records
    ]
    events = perfetto(replace(trace, records=tuple(early)))["traceEvents"]
    sent, waited = ({event["id"]: event for event in events if event["ph"] == kind} for kind in "sf")
    assert sent and all(waited[number]["ts"] >= sent[number]["ts"] for number in sent)


@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2"])
@pytest.mark.parametrize("size", [8, 0])
def test_no_arrow_leads_back_in_time(mode, size):
    """Buffers have no version: a rank that has them at the start reads them before others send them back."""
    costs = replace(StageCosts.equal(3), buffer_bytes=(0, size, size))
    trace = simulate(Program(Schedule.build(mode, 3, placement="model_parallel")), costs, 3)
    events = perfetto(trace)["traceEvents"]
    sent, waited = ({event["id"]: event for event in events if event["ph"] == kind} for kind in "sf")
    assert sent.keys() == waited.keys() and all(waited[number]["ts"] >= sent[number]["ts"] for number in sent)

    def is_read(message):
        return any(
            message.value in action.reads
            for record in trace.records
            for action in record.actions
            if record.rank == message.destination and record.slot >= message.slot
        )

    assert ("buffers" in {message.kind for message in trace.messages}) == (size > 0), "what has no bytes is not sent"
    assert len(sent) == sum(map(is_read, trace.messages))
