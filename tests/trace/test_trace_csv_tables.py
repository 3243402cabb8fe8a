"""Tables of a trace read back to what it holds."""

from __future__ import annotations

import csv
import io

import pytest

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate, version_bytes
from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.trace import step_and_worker, write_actions_csv, write_comms_csv, write_memory_csv

MODES = {"dp": "dp", "cdp_v1": "cdp_v1", "cdp_v2": "cdp_v2", "matrix": [[3, 2], [1, 1]]}


@pytest.fixture(params=MODES.values(), ids=MODES)
def simulated(request):
    n = 2 if isinstance(request.param, list) else 3
    program = Program(Schedule.build(request.param, n))
    costs = StageCosts.equal(n, 100, parameter_bytes=10)
    return program, costs, simulate(program, costs, 3)


def rows_of(write, *arguments):
    file = io.StringIO()
    write(*arguments[:1], file, *arguments[1:])
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def test_csv_reads_back_to_the_same_actions(simulated):
    program, _, trace = simulated
    rows = rows_of(write_actions_csv, trace)
    expected = [(slot.number, action) for slot in program.slots(3) for action in slot.actions]
    assert [(int(row["slot"]), row["action"]) for row in rows] == [(slot, action.label) for slot, action in expected]
    for row, (_, action) in zip(rows, expected, strict=True):
        assert row["rank"] == "0"
        if action.op.is_compute:
            assert (int(row["step"]), int(row["worker"])) == divmod(action.micro_batch, program.schedule.sizes.workers)
        else:
            assert row["worker"] == ""
            assert row["step"] == (str(action.version - 1) if action.op is Op.UPDATE else "")


def test_with_accumulation_steps_and_workers_are_told_apart():
    program = Program(Schedule.build("cdp_v2", 2, accumulate=3, placement="pipeline"))
    trace = simulate(program, StageCosts.equal(2), 3)
    rows = rows_of(write_actions_csv, trace)
    computes = [(int(row["step"]), int(row["worker"]), row["action"]) for row in rows if row["worker"]]
    for step, worker, text in computes:
        m = int(text.split("@")[0].split("m")[1])
        assert (step, worker) == (m // 6, m % 2)
    actions = [action for record in trace.records for action in record.actions if action.op.is_compute]
    assert [step_and_worker(action, trace) for action in actions] == [(step, worker) for step, worker, _ in computes]


def test_replicas_are_on_the_same_worker():
    """N = R = 2: worker 1 computes micro-batches 2 and 3 of a step at once."""
    trace = simulate(Program(Schedule.build("cdp_v1", 2, replicas=2)), StageCosts.equal(2), 2)
    rows = [row for row in rows_of(write_actions_csv, trace) if row["worker"]]
    found = {int(row["action"].split("@")[0].split("m")[1]) % 4: int(row["worker"]) for row in rows}
    assert found == {0: 0, 1: 0, 2: 1, 3: 1}


def test_an_update_is_of_the_step_whose_push_it_is():
    """On clocks each push is an update: a step has several."""
    program = Program(Schedule.build("async", 3, 2, speeds=(1, 1, 2)))
    updates = program.schedule.sizes.updates
    trace = simulate(program, StageCosts.equal(2), 3)
    made = [action for slot in program.slots(3) for action in slot.actions if action.op is Op.UPDATE]
    found = [int(row["step"]) for row in rows_of(write_actions_csv, trace) if row["action"].startswith("U")]
    assert updates == 4 and found == [(action.version - 1) // updates for action in made]
    assert sorted(found) == [step for step in range(3) for _ in range(updates * 2)], "of each of two stages"


def test_memory_csv_has_the_bytes_of_every_slot(simulated):
    program, costs, trace = simulated
    rows = rows_of(write_memory_csv, trace, version_bytes(program.schedule, costs))
    assert {int(row["slot"]): int(row["activation_bytes"]) for row in rows} == trace.activation_bytes_per_slot
    for row, record in zip(rows, trace.records, strict=True):
        assert [int(row[f"versions_stage_{stage}"]) for stage in range(trace.sizes.stages)] == list(record.versions)
        assert int(row["parameter_bytes"]) == 10 * sum(record.versions)


def test_memory_csv_has_a_row_where_a_rank_begins_to_be_idle_with_less_than_before():
    program = Program(Schedule.build("gpipe", 2, 2, "pipeline", ranks=2))
    costs = StageCosts.equal(2, 100, parameter_bytes=10)
    rows = rows_of(write_memory_csv, simulate(program, costs, 1), version_bytes(program.schedule, costs))
    assert [(row["slot"], row["rank"], row["activation_bytes"], row["parameter_bytes"]) for row in rows] == [
        ("0", "0", "100", "10"), ("0", "1", "0", "10"),
        ("1", "0", "200", "10"), ("1", "1", "100", "10"),
        ("2", "1", "200", "10"),
        ("3", "0", "200", "10"), ("3", "1", "200", "10"),
        ("4", "0", "200", "10"), ("4", "1", "100", "10"),
        ("5", "0", "100", "10"), ("5", "1", "0", "10"),
    ]  # fmt: skip


def test_memory_csv_counts_shards_as_what_they_are():
    program = Program(Schedule.build("dp", 2, placement="zero", collectives=True))
    costs = StageCosts.equal(2, 100, parameter_bytes=24)
    trace = simulate(program, costs, 2)
    rows = rows_of(write_memory_csv, trace, version_bytes(program.schedule, costs))
    assert {(row["rank"], int(row["parameter_bytes"])) for row in rows} == {("0", 2 * 16), ("1", 2 * 8)}


def test_messages_csv_has_a_row_for_each():
    trace = simulate(Program(Schedule.build("cdp_v2", 3, placement="zero")), StageCosts.equal(3, 5, 7), 3)
    rows = rows_of(write_comms_csv, trace)
    assert [tuple(row.values()) for row in rows] == [
        (str(m.slot), str(m.source), str(m.destination), m.kind, str(m.stage), str(m.bytes)) for m in trace.messages
    ]
    assert {row["kind"] for row in rows} == {"gradients", "parameters"}
