"""Rendering: golden grids, CSV that reads back, Perfetto JSON."""

from __future__ import annotations

import csv
import io
import json
import textwrap

import pytest
from cdp_repro.schedule.render import perfetto, text_grid, write_actions_csv, write_memory_csv, write_perfetto

from cdp_repro.schedule import Action, Op, Schedule, StageCosts, simulate

GRIDS = {
    "dp": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        worker 1 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        worker 2 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        update                  U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
    "cdp_v1": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        worker 1           F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        worker 2                     F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        update                                      U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
    "cdp_v2": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v1 B2v1 B1v0 B0v0
        worker 1           F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v1 F2v1 B2v1 B1v1 B0v0
        worker 2                     F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        update                                      U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
}


@pytest.mark.parametrize("mode", GRIDS)
def test_golden_grids_of_three_workers(mode):
    assert text_grid(Schedule.build(mode, 3).slots(range(2)), 3) == textwrap.dedent(GRIDS[mode]).rstrip()


def test_grid_in_blocks_of_the_given_width():
    grid = text_grid(Schedule.build("cdp_v2", 3).slots(range(2)), 3, width=50)
    blocks = [block.splitlines() for block in grid.split("\n\n")]
    assert [len(block) for block in blocks] == [5, 5]
    assert max(map(len, grid.splitlines())) <= 50
    whole = text_grid(Schedule.build("cdp_v2", 3).slots(range(2)), 3).splitlines()
    margin = len("worker 0")
    for row, line in enumerate(whole):
        first, second = (block[row] for block in blocks)
        assert (first.ljust(48) + second[margin:]).rstrip() == line


def test_grid_narrower_than_a_column_still_prints_every_slot():
    grid = text_grid(Schedule.build("dp", 2).slots(range(1)), 2, width=1)
    assert [line.split()[-1] for line in grid.splitlines() if line.startswith("slot")] == ["0", "1", "2", "3"]


def test_an_empty_grid_is_text_too():
    assert isinstance(text_grid([], 2), str)


@pytest.fixture(params=["dp", "cdp_v1", "cdp_v2", [[3, 2], [1, 1]]], ids=["dp", "cdp_v1", "cdp_v2", "matrix"])
def simulated(request):
    n = 2 if isinstance(request.param, list) else 3
    schedule = Schedule.build(request.param, n)
    costs = StageCosts.equal(n, 100, parameter_bytes=10)
    return schedule, costs, simulate(schedule, costs, 3)


def test_csv_reads_back_to_the_same_actions(simulated):
    schedule, _, trace = simulated
    file = io.StringIO()
    write_actions_csv(trace, file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    expected = [(slot.number, action) for slot in schedule.slots(range(3)) for action in slot.actions]
    assert [(int(row["slot"]), Action.parse(row["action"])) for row in rows] == expected
    for row, (_, action) in zip(rows, expected, strict=True):
        assert row["rank"] == "0"
        if action.op.is_compute:
            assert (int(row["step"]), int(row["worker"])) == divmod(action.micro_batch, schedule.workers)
        else:
            assert row["worker"] == ""
            assert row["step"] == (str(action.version - 1) if action.op is Op.UPDATE else "")


def test_memory_csv_has_the_bytes_of_every_slot(simulated):
    schedule, costs, trace = simulated
    file = io.StringIO()
    write_memory_csv(trace, file, costs.parameter_bytes, schedule.placement)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert {int(row["slot"]): int(row["activation_bytes"]) for row in rows} == trace.activation_bytes_per_slot
    for row, record in zip(rows, trace.records, strict=True):
        assert [int(row[f"versions_stage_{stage}"]) for stage in range(trace.stages)] == list(record.versions)
        assert int(row["parameter_bytes"]) == 10 * sum(record.versions)


def test_perfetto_has_one_complete_event_an_action(simulated):
    schedule, _, trace = simulated
    file = io.StringIO()
    write_perfetto(trace, file)
    loaded = json.loads(file.getvalue())
    assert loaded == json.loads(json.dumps(perfetto(trace)))
    events = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    actions = [(slot.number, action) for slot in schedule.slots(range(3)) for action in slot.actions]
    assert [(event["args"]["slot"], Action.parse(event["name"])) for event in events] == actions
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in loaded["traceEvents"]
        if event["name"] == "thread_name"
    }
    for event, (number, action) in zip(events, actions, strict=True):
        assert event["dur"] >= 0 and event["ts"] == number * 1e6
        worker = None if action.micro_batch is None else action.micro_batch % schedule.workers
        assert named[event["pid"], event["tid"]] == ("state, messages" if worker is None else f"worker {worker}")
    named_bytes = [event for event in loaded["traceEvents"] if event["name"] == "live activation bytes"]
    counters = {event["ts"]: event["args"]["bytes"] for event in named_bytes}
    assert counters == {slot * 1e6: live for slot, live in trace.activation_bytes_per_slot.items()}


def test_arrows_lead_from_each_send_to_what_waits_for_it():
    trace = simulate(Schedule.build("cdp_v2", 3, placement="replicated"), StageCosts.equal(3), 3)
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
