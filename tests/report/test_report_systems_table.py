"""The table of systems: what ran beside what was simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_rows import row_of

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.systems import simulated_system
from cdp_repro.report.groups import grouped
from cdp_repro.report.systems_table import COLUMNS, executed_systems, systems_table
from cdp_repro.studies.catalog import STUDIES, SYSTEM_MICRO_BATCHES
from cdp_repro.studies.rows import ROWS, read_rows

STUDY = STUDIES["systems"]
COMMITTED = Path(__file__).parents[2] / "results" / ROWS


def cell_of(mode: str, placement: str):
    (found,) = (cell for cell in STUDY.cells if {f"mode={mode}", f"placement={placement}"} <= {*cell.overrides})
    return found


def row_as_simulated(cell):
    """Return the row of a run that measured what is simulated."""
    costs = StageCosts.equal(cell.config.stage_count, 100, 10)
    schedule = cell.config.schedule(costs.gradient_bytes)
    system = simulated_system(schedule, costs, SYSTEM_MICRO_BATCHES)
    updates = SYSTEM_MICRO_BATCHES // schedule.micro_batches
    measured = {
        "time/idle_share_of_slots": system.idle_share,
        "memory/activation_peak_bytes_per_device": system.activation_bytes,
        "memory/parameter_peak_bytes_per_device": system.parameter_bytes,
        "memory/versions_kept": system.versions,
        "comm/messages_per_step": system.messages / updates,
        "comm/bytes_per_device_per_step": system.bytes_sent / updates,
    }
    model = cell_of("dp", "replicated")  # of which the other numbers of the summary are
    made = row_of(model, study="systems", costs=StageCosts.equal(4, 100, 10), **measured)
    summary = {**made.summary, "stages/costs": row_of_costs(costs)}
    return type(made)(**{**vars(made), "config": {**cell.settings}, "summary": summary})


def row_of_costs(costs):
    return {name: list(values) for name, values in vars(costs).items()}


@pytest.mark.parametrize(
    ("mode", "placement", "idle", "staleness"),
    [
        ("gpipe", "pipeline", "27.3 %", ["0.00", "0"]),  # (D-1)/(M+D-1) = 3/11
        ("naive", "pipeline", "75.0 %", ["0.00", "0"]),  # (D-1)/D
        ("cdp_v1", "replicated", "0.0 %", ["1.00", "1"]),
        ("pipedream", "pipeline", "0.0 %", ["1.50", "3"]),  # stage j reads 3 - j updates late
    ],
)
def test_what_ran_is_in_the_table(mode, placement, idle, staleness):
    row = row_as_simulated(cell_of(mode, placement))
    table = systems_table(grouped([row]), STUDY)
    (cells,) = table.rows
    assert cells[:2] == [mode, placement] and cells[3] == idle and cells[-2:] == staleness
    assert "Simulation gives every number" in table.notes[0]
    assert f"{len(STUDY.cells) - 1} systems have not been run: python scripts/costs.py systems" in table.notes[1]


def test_a_number_that_differs_is_told_with_both():
    row = row_as_simulated(cell_of("gpipe", "pipeline"))
    row = type(row)(**{**vars(row), "summary": {**row.summary, "comm/messages_per_step": 49}})
    (system,) = executed_systems(grouped([row]), STUDY)
    assert system.disagreements() == ["messages"] and system.text("messages") == "e 49; s 48"
    assert "differ for gpipe pipeline" in systems_table(grouped([row]), STUDY).notes[0]


def test_without_rows_the_table_says_how_to_make_them():
    table = systems_table([], STUDY)
    assert not table.rows and "20 systems have not been run" in table.notes[1]


def test_all_systems_have_run_as_simulated():
    """What is committed: 20 systems on four ranks, each number measured and simulated alike."""
    systems = executed_systems(grouped([row for row in read_rows(COMMITTED) if row.study == "systems"]), STUDY)
    assert len(systems) == len(STUDY.cells) == 20
    assert not [(each.simulated.mode, each.simulated.placement) for each in systems if each.disagreements()]
    assert all({*each.executed} == {*COLUMNS} for each in systems)
