"""What `cdp-report status` shows: each run of the studies, its state, how far it is, and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cdp_repro.observe.locked_folder import is_locked
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import CONFIG, RunDirectory, RunDirectoryError, is_trained
from cdp_repro.observe.text import table
from cdp_repro.studies.locked_log import log_path
from cdp_repro.studies.missing_runs import run_directory
from cdp_repro.studies.rows import ROWS, Row, read_rows
from cdp_repro.studies.study import Cell, Study

STATES = ("done", "finished", "running", "stopped", "interrupted", "failed", "diverged", "damaged", "missing")
"""In order: has a row; finished but not collected; being trained; killed; stopped by a signal; ...; never started."""


def status_text(studies: Iterable[Study], runs: Path, results: Path) -> str:
    """Return a table of all runs of the studies, and a line with the number of each state.

    Raises:
        RowError: a row of these studies is damaged.
    """
    lines: list[Sequence[str]] = [("study", "run", "state", "progress", "log")]
    states: Counter[str] = Counter()
    for study in studies:
        rows = {(row.cell, row.seed): row for row in read_rows(results / ROWS / study.name)}
        for cell, seed in study.runs():
            directory = run_directory(runs, study.name, cell, seed)
            row = rows.get((cell.hash, seed))
            state = run_state(directory, row)
            states[state] += 1
            epochs = cell.settings["epochs"]
            lines.append(
                (study.name, _label(study, cell, seed), state, _progress(directory, row, epochs), _log(directory))
            )
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    return f"{table(lines)}\n\n{states.total()} runs: {counts}\n"


def run_state(directory: Path, row: Row | None, outputs: Iterable[Path] = ()) -> str:
    """Return one of `STATES` for the run whose directory is, or would be, `directory`; `row` is its row, if it has one.

    `outputs` are files besides its log that hold what its processes have printed.
    """
    if row is not None:
        return "done"
    log = log_path(directory)
    # The log first: while a sweep trains, the run's own lock stays untouched, as a run waits for it only for a moment.
    if is_locked(log) or is_trained(directory):
        return "running"
    if not (directory / CONFIG).exists():
        said = any(path.is_dir() or (path.exists() and path.stat().st_size) for path in (log, *outputs))
        return "failed" if said else "missing"  # before it had a run directory
    return str(_summary(directory).get("status", "stopped"))


def _summary(directory: Path) -> dict[str, Any]:
    try:
        return RunDirectory(directory).summary()
    except RunDirectoryError:
        return {"status": "damaged"}


def _label(study: Study, cell: Cell, seed: int) -> str:
    """Return the overrides in which a run differs from others of the study."""
    own = [
        text
        for text in cell.overrides
        if len(study.cells) == 1 or any(text not in each.overrides for each in study.cells)
    ]
    has_seeds = any(len(each.seeds) > 1 for each in study.cells)
    return " ".join([*own, *([f"seed={seed}"] if has_seeds else [])])


def _progress(directory: Path, row: Row | None, epochs: int) -> str:
    """Return how many epochs are over, and the newest training step that was logged."""
    if row is not None:
        over = len(row.epochs.get("epoch", ()))
        return f"{over} of {epochs} epochs, step {row.summary['step']}{', diverged' if row.has_diverged else ''}"
    try:
        metrics = read_metrics(RunDirectory(directory).metrics_path)
    except (FileNotFoundError, RunDirectoryError):
        return "-"
    over = sum("train/epoch_loss" in each for each in metrics)
    return f"{over} of {epochs} epochs, step {max((each['step'] for each in metrics), default=0)}"


def _log(directory: Path) -> str:
    """Return the log of the sweep's process or, for a run started by hand, that of its first rank."""
    paths: Iterator[Path] = (
        path for path in (log_path(directory), RunDirectory(directory).log_path(0)) if path.exists()
    )
    return str(next(paths, "-"))
