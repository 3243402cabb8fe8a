"""`scripts/accuracy.py`, `memory.py` and `costs.py`: train the runs of studies that have no row yet."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cdp_repro.cli.console import console_logging, exit_code_of, wrapped
from cdp_repro.cli.streams import command, write_error, write_out
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.errors import nearest, refuse
from cdp_repro.config.keys import SWEEP_KEYS
from cdp_repro.config.paths import typed_path
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.missing_runs import Options, train_missing
from cdp_repro.studies.rows import ROWS
from cdp_repro.studies.slurm_array import write_array_script

USAGE = """usage: python {script} [study ...] [--option=value ...]
       [key=value ...]

Train those runs of the studies that have no row in results/rows yet, and
collect each as it finishes. Safe to stop, to kill and to repeat: finished runs
are skipped, others go on from their newest checkpoint.

  python {script}
{default}
  python {script} --seeds=1 --jobs=4
      one seed of each cell, four runs at once
  python {script} --slurm=sweep.sh && sbatch sweep.sh
      one job a run

Options
  --jobs=1              runs at once; they share the cores (OMP_NUM_THREADS, if
                        set, is the threads of each process)
  --seeds=K             only the first K seeds of each cell
  --runs=runs/studies   where run directories are, with a log beside each
  --results=results     where rows are, in rows/
  --slurm=FILE          train nothing; write an array script for sbatch, to be
                        submitted from this folder
  --run=K               only run K of the list, from 0, whatever else is
                        missing: what a job of the array does

{studies}
{keys}
"""


@command
def main(study_names: Sequence[str], arguments: Sequence[str], script: str) -> int:
    """Train the missing runs of these studies, or of the studies that the arguments name.

    Args:
        study_names: The studies to train if the arguments name none.
        arguments: As `USAGE` says.
        script: The file that was called, named in the help and in scripts for SLURM.

    Returns:
        The exit code: 0; 1 if a run failed; 2 for the user's mistakes; 128 + k after signal k.
    """
    script = os.path.relpath(script)
    if {"--help", "-h"} & set(arguments):
        write_out(
            USAGE.format(
                script=script,
                default=wrapped(f"      {', '.join(study_names)}", 6),
                studies=wrapped(f"Studies: {', '.join(STUDIES)}", 9),
                keys=wrapped(f"Keys, as cdp-train has them: {', '.join(SWEEP_KEYS)}", 6),
            )
        )
        return 0
    with exit_code_of() as result:
        options = parsed(arguments, study_names)
        console_logging()
        result.code = _train(options) if options.slurm is None else _write_script(options, options.slurm, script)
    return result.code


def _train(options: Options) -> int:
    """Train the missing runs; list failures at the end."""
    outcome = train_missing(options)
    for failure in outcome.failures:
        write_error(f"{failure}\n")
    write_out(f"{outcome.done} of {outcome.total} runs are done, with rows in {options.results / ROWS}\n")
    if outcome.signal is not None:
        write_error(f"stopped by signal {outcome.signal}: call it again to go on\n")
        return 128 + outcome.signal
    return 1 if outcome.failures else 0


def _write_script(options: Options, path: Path, script: str) -> int:
    output = write_array_script(options, path, script)
    runs = len(options.listed())
    write_out(f"wrote {path}: sbatch {shlex.quote(str(path))} queues {runs} runs, output in {output}\n")
    return 0


def parsed(arguments: Sequence[str], study_names: Sequence[str]) -> Options:
    """Return the options; raise ConfigError that lists all mistakes."""
    given = [text.partition("=")[::2] for text in arguments if text.startswith("-")]
    overrides = tuple(text for text in arguments if not text.startswith("-") and "=" in text)
    names = [text for text in arguments if not text.startswith("-") and "=" not in text]
    problems = [
        f"unknown study {name!r}: choose {', '.join(STUDIES)}{nearest(name, STUDIES)}"
        for name in names
        if name not in STUDIES
    ]
    values: dict[str, Any] = {}
    for option, value in given:
        name = option.removeprefix("--")
        if name in values:
            problems.append(f"{option}= is given twice: leave one out")
        try:
            values[name] = _value(name, value)
        except ValueError as error:
            problems.append(str(error))
    problems += [
        f"{text} is not for a sweep, its cells are what they are: only {', '.join(SWEEP_KEYS)} may be given"
        for text in overrides
        if text.partition("=")[0] not in SWEEP_KEYS
    ]
    keys = [text.partition("=")[0] for text in overrides]
    problems += [f"{key} is given twice: leave one out" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    known = all(name in STUDIES for name in names)
    studies = tuple(dict.fromkeys(names or study_names)) if known else ()
    passed_on, wrong = _passed_on(studies, [text for text in overrides if text.partition("=")[0] in SWEEP_KEYS])
    options = Options(studies, **values, overrides=overrides, passed_on=passed_on)
    refuse([*problems, *wrong, *_inconsistent(options)])
    return options


def _value(name: str, value: str) -> int | Path:
    """Return the value of an option; raise ValueError, with advice, if the option or its value is wrong."""
    minima = {"jobs": 1, "seeds": 1, "run": 0}
    if name in ("runs", "results", "slurm"):
        if not value:
            raise ValueError(f"--{name}= names no {'file' if name == 'slurm' else 'folder'}")
        path = typed_path(value)
        if "'" in path or "\\" in path:  # sbatch has quoting rules of its own
            raise ValueError(f"--{name}={value}: use a path without quotes and backslashes")
        return Path(path)
    if name not in minima:
        names = [*minima, "runs", "results", "slurm"]
        typed = name if name.startswith("-") else f"--{name}"
        raise ValueError(f"unknown option {typed}: choose {', '.join(f'--{each}=' for each in names)}")
    if not value.isdecimal() or int(value) < minima[name]:
        raise ValueError(f"--{name}={value}: must be a whole number, {minima[name]} or more, e.g. --{name}=1")
    return int(value)


def _inconsistent(options: Options) -> Iterator[str]:
    """Yield a sentence for each pair of options that exclude each other."""
    total = len(options.listed())
    if options.studies and options.run is not None and options.run >= total:
        yield f"--run={options.run}: there are {total} runs, use --run=0 to --run={total - 1}"
    if options.slurm is not None and (options.run is not None or options.jobs > 1):
        yield "--slurm= makes a job of each run: drop --run= and --jobs="


_DECIDE_WHAT_A_KEY_MEANS = ("dataset=", "experiment=", "model=")
"""Beginnings of the overrides of a study beside which a setting is tried; tokens need a model that reads them."""


def _passed_on(studies: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return, by study, the overrides that its data set has, and the mistakes in overrides that no data set has."""
    found: dict[str, tuple[str, ...]] = {}
    mistakes: dict[str, ConfigError] = {}
    for name in studies:
        groups = [text for text in STUDIES[name].cells[0].overrides if text.startswith(_DECIDE_WHAT_A_KEY_MEANS)]
        for text in overrides:
            try:
                compose_config([*groups, text], check_device=False)
                found[name] = (*found.get(name, ()), text)
            except ConfigError as error:
                mistakes[text] = error
    used = {text for texts in found.values() for text in texts}
    return found, [problem for text, error in mistakes.items() if text not in used for problem in error.problems]
