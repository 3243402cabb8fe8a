"""Trains the runs of studies that have no row yet, here or in another study.

<runs>/<study>/<dataset>-<model>-<mode>-<placement>-N<workers>-seed<k>-<cell>/      a run directory
<runs>/<study>/<dataset>-<model>-<mode>-<placement>-N<workers>-seed<k>-<cell>.log   what its processes printed

A sweep may be killed and repeated while a run still goes on, and two may share their work: see `locked_log`.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from cdp_repro.config.keys import changeable
from cdp_repro.config.task import task_of
from cdp_repro.launch.signals import StopRequest
from cdp_repro.launch.train_process import train_in_process
from cdp_repro.observe.run_directory import CONFIG, RunDirectory, RunDirectoryError, arguments_to_go_on
from cdp_repro.observe.versions import short, versions
from cdp_repro.studies.at_once import Ended, threads_of, train_at_once
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.collecting import collect
from cdp_repro.studies.locked_log import locked_log, log_path
from cdp_repro.studies.rows import DIVERGED, ROWS, Row, RowError, read_rows, run_name, write_row
from cdp_repro.studies.study import Cell

logger = logging.getLogger("cdp_repro")


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    study: str
    cell: Cell
    seed: int

    @cached_property
    def key(self) -> tuple[str, str, int]:
        """Study, cell and seed, which identify a run and its row."""
        return self.study, self.cell.hash, self.seed


@dataclass(frozen=True)
class Options:
    """Options of a sweep."""

    studies: tuple[str, ...]
    jobs: int = 1
    seeds: int | None = None
    runs: Path = Path("runs/studies")
    results: Path = Path("results")
    slurm: Path | None = None
    run: int | None = None
    overrides: tuple[str, ...] = ()
    """As given; only keys in `SWEEP_KEYS`."""
    passed_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By study: the overrides that apply to its data set."""

    def listed(self) -> list[Run]:
        """Return all runs, done or not, in an order that does not change while they finish."""
        return [
            Run(name, cell, seed)
            for name in self.studies
            for cell, seed in STUDIES[name].runs()
            if seed in cell.seeds[: self.seeds]
        ]


def run_directory(root: Path, study: str, cell: Cell, seed: int) -> Path:
    """Return the directory of a run: readable, and different for different settings."""
    return root / study / run_name(cell.settings, cell.hash, seed)


@dataclass(frozen=True)
class Outcome(Ended):
    """How far a sweep has come."""

    done: int
    """Runs that have a row."""
    total: int


def train_missing(options: Options) -> Outcome:
    """Train all runs without a row; go on after failures."""
    runs = options.listed()
    if options.run is not None:
        runs = [runs[options.run]]
    rows = {(row.study, row.cell, row.seed): row for row in _rows(options)}
    missing = _not_taken_over([run for run in runs if run.key not in rows], rows, options)
    _warn_of_other_code(rows.values(), missing)
    ended = train_at_once(missing, options.jobs, lambda run, label, stop: _complete(run, options, stop, label))
    present = {(row.study, row.cell, row.seed) for row in _rows(options)}
    return Outcome(ended.failures, ended.signal, sum(run.key in present for run in runs), len(runs))


def _rows(options: Options) -> list[Row]:
    """Return the rows of the chosen studies; damaged rows of others do no harm here."""
    return [row for name in options.studies for row in read_rows(options.results / ROWS / name)]


def _not_taken_over(missing: Sequence[Run], rows: Mapping[tuple[str, str, int], Row], options: Options) -> list[Run]:
    """Write the rows of the runs that other studies have; return the remaining runs.

    The same settings with the same seed are the same run, in whatever study. A run is taken over only if all seeds of
    its cell have rows, here or elsewhere, of one version of the code, as no table averages two versions. That counts
    seeds that are not wanted now, too.
    """
    if not missing:
        return []
    elsewhere: dict[tuple[str, int], Row] = {}
    for name in STUDIES:
        with suppress(RowError):  # another study's damaged rows are of no use here
            elsewhere |= {(row.cell, row.seed): row for row in read_rows(options.results / ROWS / name)}
    left = []
    for run in missing:
        cell = run.cell.hash
        whole = [rows.get((run.study, cell, seed)) or elsewhere.get((cell, seed)) for seed in run.cell.seeds]
        if None in whole or len({row.code for row in whole if row}) > 1:
            left.append(run)
            continue
        found = elsewhere[cell, run.seed]
        if found.has_diverged and not STUDIES[run.study].counts_divergence:
            left.append(run)  # to be reported as failed
            continue
        write_row(replace(found, study=run.study), options.results / ROWS)
        logger.info("%s: seed %d is taken over from the study %s", run.study, run.seed, found.study)
    return left


def _warn_of_other_code(rows: Iterable[Row], missing: Sequence[Run]) -> None:
    """Warn if a cell would mix rows of different code, whose numbers may differ."""
    cells = {(study, cell) for study, cell, _ in (run.key for run in missing)}
    concerned = [row for row in rows if (row.study, row.cell) in cells]
    if not concerned:
        return
    present = versions()
    commits = {row.code: short(row.summary["version/git_commit"]) for row in concerned}
    for code, number in Counter(row.code for row in concerned).items():
        if code != present["version/code"]:
            logger.warning(
                "warning: %d rows of these cells come of code %s (commit %s), new ones will of code %s (commit %s): "
                "cdp-report averages no two versions, so go back to that commit or remove those rows",
                number, code, commits[code], present["version/code"], short(present["version/git_commit"]),
            )  # fmt: skip


def _complete(run: Run, options: Options, stop: StopRequest, label: str) -> str | None:
    """Train what is left of one run, and write its row; return a sentence if that failed."""
    directory = run_directory(options.runs, run.study, run.cell, run.seed)
    name = f"{run.study}: {run.cell.command(run.seed)}"
    diverged_too = STUDIES[run.study].counts_divergence
    ends = ("finished", DIVERGED) if diverged_too else ("finished",)
    try:
        with locked_log(log_path(directory), stop) as log:
            if stop.signal is not None:
                return None
            verb = "collected"
            if _status(directory) not in ends:
                arguments = _arguments(run, directory, options)
                logger.info("%s %s", label, shlex.join(["cdp-train", *arguments]))
                code = train_in_process(arguments, stop, threads_of(run.cell.config.processes, options.jobs), log)
                verb = _status(directory)
                if code and verb not in ends:
                    return None if stop.signal is not None else _failure(name, code, log_path(directory))
            row = collect(directory, run.study, diverged_too)
            if row.cell != run.cell.hash:
                return f"{name}: {directory} has ended on another placement: move it away, and this run is trained anew"
            write_row(row, options.results / ROWS)
            task = task_of(row.config["dataset.name"])
            score = "" if row.has_diverged else f", {task.name} {task.score_text(row.summary)}"
            logger.info("%s %s%s", label, verb, score)
    except (RowError, RunDirectoryError, json.JSONDecodeError, OSError) as error:
        return f"{name}: {error}"
    return None


def _status(directory: Path) -> str:
    """Return the status in the summary of a run; "" if the run has not begun."""
    return str(RunDirectory.open(directory).summary().get("status", "")) if (directory / CONFIG).exists() else ""


def _arguments(run: Run, directory: Path, options: Options) -> list[str]:
    """Return the arguments of `cdp-train` that start the run or, if it has a directory, resume it."""
    given = options.passed_on.get(run.study, ())
    if not any(text.startswith("wandb=") for text in given):
        given = (*given, "wandb=disabled")
    if (directory / CONFIG).exists():
        return [*arguments_to_go_on(directory), *changeable(given)]
    return [*run.cell.arguments(run.seed), *given, f"run_dir={directory}"]


def _failure(name: str, code: int, log: Path) -> str:
    """Return a sentence on the end of a run, with the last line of its output."""
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    return f"{how}: {name}{said} (see {log})"
