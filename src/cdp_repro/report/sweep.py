"""Trains the runs of studies that have no row yet: what `scripts/accuracy.py` and its neighbours do.

<runs>/<study>/<dataset>-<model>-<mode>-<placement>-N<workers>-seed<k>-<cell>/      a run directory
<runs>/<study>/<dataset>-<model>-<mode>-<placement>-N<workers>-seed<k>-<cell>.log   what its processes printed

Who works on a run holds a lock on its log, and so does, by inheritance, the process that trains. So a sweep may be
killed and repeated while a run of it still goes on, and two sweeps may share their work: each waits for the other.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

from cdp_repro.cli.cells import run_cell
from cdp_repro.cli.common import console_logging, exit_code_of, write_out
from cdp_repro.cli.compose import compose_config
from cdp_repro.cli.train import CHANGEABLE
from cdp_repro.config import ConfigError, nearest
from cdp_repro.files import replace_file
from cdp_repro.report.rows import ROWS, Row, RowError, collect, read_rows, run_name, write_row
from cdp_repro.report.studies import STUDIES, Cell
from cdp_repro.training.run import versions
from cdp_repro.training.signals import StopRequest
from cdp_repro.training.tracking import COMMAND, CONFIG, RunDirectory, RunDirectoryError

logger = logging.getLogger("cdp_repro")

FREE = (
    "dataset.root", "dataset.download", "dataset.loader_workers", "wandb", "wandb_project", "keep_checkpoints",
    "checkpoint_every_steps", "log_every_steps", "timeout_seconds",
)  # fmt: skip
"""Settings that a sweep may be given: they change neither a number nor what is recorded of a run."""

USAGE = """usage: python {script} [study ...] [--option=value ...] [key=value ...]

Train those runs of the studies that have no row in results/rows yet, and collect each as it finishes. Safe to stop,
to kill and to repeat: finished runs are skipped, others go on from their newest checkpoint.

  python {script}                                  {default}
  python {script} --seeds=1 --jobs=4               one seed of each cell, four runs at once
  python {script} --slurm=sweep.sh && sbatch sweep.sh    one job a run

Options
  --jobs=1              runs at once; they share the cores (OMP_NUM_THREADS, if set, is the threads of each process)
  --seeds=K             only the first K seeds of each cell
  --runs=runs/studies   where run directories are, with a log beside each
  --results=results     where rows are, in rows/
  --slurm=FILE          train nothing; write an array script for sbatch, to be submitted from this folder
  --run=K               only run K of the list, from 0, whatever else is missing: what a job of the array does

Studies: {studies}
Keys, as cdp-train has them: {keys}
"""


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    study: str
    cell: Cell
    seed: int

    @cached_property
    def key(self) -> tuple[str, str, int]:
        """Study, cell and seed: what tells runs apart, as it does rows."""
        return self.study, self.cell.hash, self.seed


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    studies: tuple[str, ...]
    jobs: int = 1
    seeds: int | None = None
    runs: Path = Path("runs/studies")
    results: Path = Path("results")
    slurm: Path | None = None
    run: int | None = None
    overrides: tuple[str, ...] = ()
    """As given; of `FREE`."""
    passed_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each study, by its name, those that its data set knows."""

    def listed(self) -> list[Run]:
        """Return all runs, done or not, in an order that does not change while they finish."""
        return [
            Run(name, cell, seed)
            for name in self.studies
            for cell, seed in STUDIES[name].runs()
            if seed in cell.seeds[: self.seeds]
        ]


def main(study_names: Sequence[str], arguments: Sequence[str], script: str) -> int:
    """Train what is missing of the studies, or of those that the arguments name.

    Args:
        study_names: Unless the arguments name others.
        arguments: As `USAGE` says.
        script: The file that was called, for the help and for jobs.

    Returns:
        The exit code: 0; 1 if a run failed; 2 for the user's mistakes; 128 + k after signal k.
    """
    script = os.path.relpath(script)
    if {"--help", "-h"} & set(arguments):
        write_out(
            USAGE.format(
                script=script, default=", ".join(study_names), studies=", ".join(STUDIES), keys=", ".join(FREE)
            )
        )
        return 0
    with exit_code_of() as result:
        options = parsed(arguments, study_names)
        console_logging()
        result.code = _train_missing(options) if options.slurm is None else _write_script(options, script)
    return result.code


def run_directory(root: Path, study: str, cell: Cell, seed: int) -> Path:
    """Return the directory of a run: readable, and another for other settings."""
    return root / study / run_name(cell.settings, cell.hash, seed)


def log_path(directory: Path) -> Path:
    """Return the file that takes what the processes of a run print."""
    return directory.with_name(f"{directory.name}.log")


# --- the command line ----------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str], study_names: Sequence[str]) -> Options:
    """Return the options; raise ConfigError with everything that is wrong with them."""
    given = dict(text.removeprefix("--").partition("=")[::2] for text in arguments if text.startswith("-"))
    overrides = tuple(text for text in arguments if not text.startswith("-") and "=" in text)
    names = [text for text in arguments if not text.startswith("-") and "=" not in text]
    problems = [
        f"unknown study {name!r}: choose {', '.join(STUDIES)}{nearest(name, STUDIES)}"
        for name in names
        if name not in STUDIES
    ]
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = _value(name, value)
        except ValueError as error:
            problems.append(str(error))
    problems += [
        f"{text} is not for a sweep, its cells are what they are: only {', '.join(FREE)} may be given"
        for text in overrides
        if text.partition("=")[0] not in FREE
    ]
    if problems:
        raise ConfigError(problems)
    studies = tuple(dict.fromkeys(names or study_names))
    options = Options(studies, **values, overrides=overrides, passed_on=_passed_on(studies, overrides))
    _refuse_inconsistent(options)
    return options


def _value(name: str, value: str) -> int | Path:
    """Return the value of an option; ValueError says what is wrong with it."""
    minima = {"jobs": 1, "seeds": 1, "run": 0}
    if name in ("runs", "results", "slurm"):
        if not value:
            raise ValueError(f"--{name}= names no {'file' if name == 'slurm' else 'folder'}")
        if "'" in value or "\\" in value:
            raise ValueError(f"--{name}={value}: use a path without quotes and backslashes")
        return Path(value)
    if name not in minima:
        names = [*minima, "runs", "results", "slurm"]
        raise ValueError(f"unknown option --{name.lstrip('-')}: choose {', '.join(f'--{each}=' for each in names)}")
    if not value.isdecimal() or int(value) < minima[name]:
        raise ValueError(f"--{name}={value}: must be a whole number, {minima[name]} or more, e.g. --{name}=1")
    return int(value)


def _refuse_inconsistent(options: Options) -> None:
    total = len(options.listed())
    if options.run is not None and options.run >= total:
        raise ConfigError([f"--run={options.run}: there are {total} runs, use --run=0 to --run={total - 1}"])
    if options.slurm is not None and (options.run is not None or options.jobs > 1):
        raise ConfigError(["--slurm= makes a job of each run: drop --run= and --jobs="])


def _passed_on(studies: Sequence[str], overrides: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return by study those overrides that its data set has a use for; ConfigError for one that fits nowhere."""
    found: dict[str, tuple[str, ...]] = {}
    mistakes: dict[str, ConfigError] = {}
    for name in studies:
        groups = [text for text in STUDIES[name].cells[0].overrides if text.startswith(("dataset=", "experiment="))]
        for text in overrides:
            try:
                compose_config([*groups, text], check_device=False)
                found[name] = (*found.get(name, ()), text)
            except ConfigError as error:
                mistakes[text] = error
    used = {text for texts in found.values() for text in texts}
    for text, mistake in mistakes.items():
        if text not in used:
            raise mistake
    return found


# --- training ------------------------------------------------------------------------------------------------------


def _train_missing(options: Options) -> int:
    """Train all runs without a row; go on after failures and list them at the end."""
    runs = options.listed()
    if options.run is not None:
        runs = [runs[options.run]]
    rows = {(row.study, row.cell, row.seed): row for row in _rows(options)}
    missing = [run for run in runs if run.key not in rows]
    _warn_of_other_code(rows.values(), missing)
    failures: list[str] = []
    with StopRequest() as stop, ThreadPoolExecutor(options.jobs) as pool:
        numbered = enumerate(missing, start=1)
        futures = [pool.submit(_complete, run, options, stop, f"[{number}/{len(missing)}]") for number, run in numbered]
        try:
            failures += [failure for future in as_completed(futures) if (failure := future.result())]
        except KeyboardInterrupt:  # the second one: threads cannot be interrupted, so end as a process without them
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    present = {(row.study, row.cell, row.seed) for row in _rows(options)}
    done = sum(run.key in present for run in runs)
    write_out(f"{done} of {len(runs)} runs are done, with rows in {options.results / ROWS}\n")
    if stop.signal is not None:
        sys.stderr.write(f"stopped by signal {stop.signal}: call it again to go on\n")
        return 128 + stop.signal
    return 1 if failures else 0


def _rows(options: Options) -> list[Row]:
    """Return the rows of the studies; others may be damaged without harm here."""
    return [row for name in options.studies for row in read_rows(options.results / ROWS / name)]


def _warn_of_other_code(rows: Iterable[Row], missing: Sequence[Run]) -> None:
    """Say so if runs of one cell are about to come from different code, by which their numbers may differ."""
    cells = {(study, cell) for study, cell, _ in (run.key for run in missing)}
    concerned = [row for row in rows if (row.study, row.cell) in cells]
    if not concerned:
        return
    present = versions()
    commits = {row.code: str(row.summary["version/git_commit"])[:12] for row in concerned}
    for code, number in Counter(row.code for row in concerned).items():
        if code != present["version/code"]:
            logger.warning(
                "warning: %d rows of these cells come of code %s (commit %s), new ones will of code %s (commit %s): "
                "cdp-report averages no two versions, so go back to that commit or remove those rows",
                number, code, commits[code], present["version/code"], present["version/git_commit"][:12],
            )  # fmt: skip


def _complete(run: Run, options: Options, stop: StopRequest, label: str) -> str | None:
    """Bring one run from wherever it is to its row; return what went wrong, if something did."""
    directory = run_directory(options.runs, run.study, run.cell, run.seed)
    name = f"{run.study}: {run.cell.command(run.seed)}"
    try:
        with _locked_log(log_path(directory), stop) as log:
            if stop.signal is not None:
                return None
            code, verb = 0, "collected"
            if not _is_finished(directory):
                verb = "finished"
                arguments = _arguments(run, directory, options)
                logger.info("%s %s", label, shlex.join(["cdp-train", *arguments]))
                code = run_cell(arguments, stop, _threads(run.cell, options.jobs), log)
            if code:
                return None if stop.signal is not None else _failure(name, code, log_path(directory))
            row = collect(directory, run.study)
            write_row(row, options.results / ROWS)
            logger.info("%s %s, test top-1 %.2f %%", label, verb, row.summary["eval/top1_percent"])
    except (RowError, RunDirectoryError, json.JSONDecodeError, OSError) as error:
        return f"{name}: {error}"
    return None


@contextmanager
def _locked_log(path: Path, stop: StopRequest) -> Iterator[IO[bytes]]:
    """Open a run's log once no other process works on the run, or once a stop is requested.

    The lock belongs to the open file, so that the process whose output the file takes holds it, too. For the same
    reason it must end by closing: to unlock it here would do so for a process that still trains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        told = False
        while stop.signal is None:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    logger.info("another process trains in %s: waiting for it", path.with_suffix(""))
                told = True
                time.sleep(0.2)
        yield log


def _is_finished(directory: Path) -> bool:
    return (directory / CONFIG).exists() and RunDirectory.open(directory).summary().get("status") == "finished"


def _arguments(run: Run, directory: Path, options: Options) -> list[str]:
    """Return what `cdp-train` is called with: to start the run or, if it has a directory, to go on with it."""
    given = options.passed_on.get(run.study, ())
    if not any(text.startswith("wandb=") for text in given):
        given = (*given, "wandb=disabled")
    if (directory / CONFIG).exists():
        return [f"resume={directory}", *(text for text in given if text.partition("=")[0] in CHANGEABLE)]
    _remove_half_made(directory)
    return [*run.cell.arguments(run.seed), *given, f"run_dir='{directory}'"]  # quoted for Hydra


def _remove_half_made(directory: Path) -> None:
    """Remove a directory of a run that was killed before its configuration was written: there is nothing in it yet."""
    for name in (COMMAND, f".{CONFIG}.new"):
        (directory / name).unlink(missing_ok=True)
    for folder in (directory / "checkpoints", directory / "logs", directory):
        with suppress(OSError):  # not there or, against all expectation, not empty, which cdp-train then refuses
            folder.rmdir()


def _threads(cell: Cell, jobs: int) -> dict[str, str]:
    """Return the environment in which the processes of several runs share the cores; one run finds its own way."""
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs // cell.config.ranks))}


def _failure(name: str, code: int, log: Path) -> str:
    """Say how a run ended, with the last line it printed."""
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    return f"{how}: {name}{said} (see {log})"


# --- SLURM ---------------------------------------------------------------------------------------------------------

_SCRIPT = r"""#!/bin/bash
# Trains @runs@ runs, one a job of the array. Submit it in the folder in which it was written: sbatch @file@
# Submit it again to go on: jobs whose run is done end at once. Add what your cluster asks for (--partition, --time,
# --gres, fewer --cpus-per-task where a node has fewer) here, or give it to sbatch.
#SBATCH --job-name=@name@
#SBATCH --array=0-@last@
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=@cores@
#SBATCH --output=@output@
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@120

cd "$SLURM_SUBMIT_DIR" || exit 1

# A run of several ranks starts them itself, in this job. sbatch passes on the environment it was called in: called
# under srun or torchrun, that would make cdp-train think that it is one rank of theirs.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_STEP_NODELIST

"${PYTHON:-python}" @command@ --run="$SLURM_ARRAY_TASK_ID" &
child=$!

# The run writes a checkpoint and ends with 143. USR2 comes before the time limit: the job then queues again, and goes
# on from there. TERM comes from scancel, which means it, or from a pre-emption, after which SLURM itself requeues.
stop() {
    trap '' USR2 TERM  # a second signal would end this script before the run has written its checkpoint
    kill -TERM "$child" 2>/dev/null
    wait "$child"
    code=$?
    if [ "$1" = requeue ] && [ "$code" -eq 143 ]; then
        scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    fi
    exit "$code"
}
trap 'stop requeue' USR2
trap 'stop' TERM

wait "$child"
"""


def _write_script(options: Options, script: str) -> int:
    """Write the array script, and the folder of the jobs' output, without which SLURM would fail them silently."""
    runs = options.listed()
    path, output = options.slurm, options.runs / "slurm"
    assert path is not None
    text = _script(options, script, path, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            [f"cannot write {error.filename}: {error.strerror}; pass another --slurm= or --runs="]
        ) from error
    write_out(f"wrote {path}: sbatch {shlex.quote(str(path))} queues {len(runs)} runs, output in {output}\n")
    return 0


def _script(options: Options, script: str, path: Path, output: Path) -> str:
    runs = options.listed()
    arguments = [script, *options.studies, *options.overrides, f"--runs={options.runs}", f"--results={options.results}"]
    if options.seeds is not None:
        arguments.append(f"--seeds={options.seeds}")
    most = max(cell.config.ranks for cell in {run.cell for run in runs})
    values = {
        "runs": str(len(runs)),
        "file": path.name,
        "name": f"cdp-{'-'.join(options.studies)}",
        "last": str(len(runs) - 1),
        "cores": str(max(4, most)),
        "output": shlex.quote(f"{output}/%A_%a.log"),
        "command": shlex.join(arguments),
    }
    text = _SCRIPT
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text
