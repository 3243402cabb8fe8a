"""Rows for the tests of the report, as runs would have left them."""

from __future__ import annotations

from dataclasses import asdict

from cdp_repro.config.keys import RUN_KEYS
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule
from cdp_repro.studies.rows import Row
from cdp_repro.studies.study import Cell


def row_of(cell: Cell, seed: int = 0, study: str = "digits", top1: float = 90.0, costs=None, **changed) -> Row:
    """Return the row of a run of `cell`; `changed` values of the summary take the place of plausible ones."""
    settings = {key: value for key, value in cell.settings.items() if key not in RUN_KEYS} | {"seed": seed}
    n = settings["workers"]
    costs = costs or StageCosts.equal(n, 100, 10)
    schedule = Schedule.build(settings["mode.name"], n, slot_order=settings["slot_order"])
    trace = simulate(Program(schedule), costs, 3)
    summary = {
        "ranks": 1, "dataset/description": "made up", "dataset/fingerprint": "f", "version/code": "c",
        "version/git_commit": "0123456789abcdef", "version/torch": "2", "version/python": "3", "hardware": "abacus",
        "step": 10 * settings["epochs"], "staleness": [[0] * n] * n, "stages/costs": asdict(costs),
        "eval/top1_percent": top1, "train/loss": 0.5, "ledger/reads": 80, "time/step_seconds_median": 0.1,
        "memory/activation_peak_bytes_total": trace.activation_peak_bytes_total,
    }  # fmt: skip
    epochs = list(range(settings["epochs"]))
    return Row(
        study=study,
        config=settings,
        command=cell.command(seed),
        summary=summary | changed,
        epochs={"epoch": epochs, "eval/top1_percent": [top1 for _ in epochs]},
        activation_bytes=list(trace.activation_bytes_per_slot.values()),
        sent_bytes=[],
        actions=[],
        source=f"{study}-{seed}",
    )
