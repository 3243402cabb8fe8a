"""Starts the cells of a sweep: here, one or several at once, or as an array of jobs of SLURM."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cdp_repro.config import ConfigError
from cdp_repro.config.errors import refuse
from cdp_repro.config.keys import changeable
from cdp_repro.config.sweep_launcher import SlurmLauncher
from cdp_repro.launch.signals import StopRequest
from cdp_repro.launch.slurm_script import ArrayScript
from cdp_repro.launch.train_process import train_in_process
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.run_directory import CONFIG, SAVED, RunDirectory
from cdp_repro.studies.at_once import Ended, threads_of, train_at_once
from cdp_repro.studies.cells import Cell
from cdp_repro.studies.locked_log import locked_log

logger = logging.getLogger("cdp_repro")

SCRIPT = "sweep.sh"


def train_here(cells: Sequence[Cell], jobs: int) -> Ended:
    """Train the cells in processes of their own, `jobs` at once; go on after failures.

    Those that were stopped go on, so that a sweep can be repeated.
    """
    return train_at_once(cells, jobs, lambda cell, label, stop: _train(cell, label, stop, jobs))


def _train(cell: Cell, label: str, stop: StopRequest, jobs: int) -> str | None:
    """Train one cell; return a sentence if it failed."""
    if stop.signal is not None:
        return None
    logger.info("%s %s", label, cell.name)
    try:
        with locked_log(cell.log, stop) as log:
            if stop.signal is not None:
                return None
            if jobs == 1:
                code = _train_alone(cell, stop, log)
                where = cell.directory if cell.directory.exists() else cell.log  # not before its configuration is read
            else:
                threads = threads_of(cell.config.processes, jobs)
                code, where = train_in_process(cell.arguments(), stop, threads, log), cell.log
                logger.info("%s %s: %s", label, cell.name, "finished" if code == 0 else f"exit code {code}")
    except OSError as error:
        return f"{cell.name}: {error}"
    return None if code == 0 or stop.signal is not None else f"exit code {code}: {cell.name} (see {where})"


def _train_alone(cell: Cell, stop: StopRequest, log: IO[bytes]) -> int:
    """Train a cell that prints where this process prints; return its exit code. Its log gets only its last words."""
    cell.log.write_bytes(b"")  # the words of an earlier failure are of no use beside those of this run
    code = train_in_process(cell.arguments(), stop, held=[log])
    if code and stop.signal is None:
        cell.log.write_text(f"exit code {code}; {_last_words(cell)}\n")
    return code


def _last_words(cell: Cell) -> str:
    """Return how a run that printed to the terminal has ended, from its own log: the error without its class."""
    log = RunDirectory(cell.directory).log_path(0)
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    told = re.match(r"[\w.]*Error: (.*)", lines[-1]) if lines else None
    return f"error: {told[1]}" if told else "what it printed went to the terminal of the sweep"


def array_script(root: Path, cells: Sequence[Cell], launcher: SlurmLauncher) -> str:
    """Return the script that trains the cells, one per job of an array.

    Raises:
        ConfigError: the nodes cannot share the ranks of a cell equally.
    """
    processes = {cell.name: cell.config.processes for cell in cells}
    uneven = [
        f"launcher.nodes={launcher.nodes} cannot share the {ranks} ranks of {name} equally: use launcher.nodes=1"
        for name, ranks in processes.items()
        if ranks % launcher.nodes
    ]
    refuse(uneven)
    by_srun = launcher.nodes > 1
    train = '"${PYTHON:-python}" -m cdp_repro.cli.train "${arguments[@]}"'
    return ArrayScript(
        comment=f"# Trains {len(cells)} runs, one a job of the array. Queue it again to go on: jobs whose run is done "
        f"end at once.\n# Status: cdp-train --status={shlex.quote(str(root))}",
        name=f"cdp-{root.name}",
        jobs=len(cells),
        at_once=launcher.at_once,
        options=_options(launcher, max(processes.values())),
        output_folder=f"{root}/slurm",
        prepare=_cases(cells, by_srun),
        # since SLURM 22.05, srun does not take over the CPUs of sbatch
        command=f"srun --ntasks=$ranks --cpus-per-task={launcher.cpus_per_task} {train}" if by_srun else train,
        by_srun=by_srun,
    ).text()


def _options(launcher: SlurmLauncher, ranks: int) -> list[str]:
    shared = {"partition": launcher.partition, "account": launcher.account, "time": launcher.time, "mem": launcher.mem}
    tasks = ranks // launcher.nodes if launcher.nodes > 1 else 1  # on one node the run starts its ranks itself
    found = [f"--nodes={launcher.nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={launcher.cpus_per_task}"]
    found += [f"--gpus-per-node={launcher.gpus_per_node}"] if launcher.gpus_per_node else []
    return [*found, *(f"--{name}={shlex.quote(value)}" for name, value in shared.items() if value is not None)]


def _cases(cells: Sequence[Cell], by_srun: bool) -> str:
    """Return the lines that tell a job its run: where it is, and how it begins or goes on."""
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, cell in enumerate(cells):
        ranks = f"ranks={cell.config.processes}; " if by_srun else ""
        lines.append(
            f"{number}) {ranks}run={shlex.quote(str(cell.directory))}; arguments=({shlex.join(cell.begin)}); "
            f"changeable=({shlex.join(changeable(cell.begin))}) ;;"
        )
    is_saved = " || ".join(f"compgen -G '{pattern}'" for pattern in SAVED)
    lines += [
        "esac",
        f'if [ -e "$run/{CONFIG}" ]; then',
        '  arguments=("resume=$run" "${changeable[@]}")',
        # in the folder, as its name may look like a pattern
        f'  (cd "$run" && {{ {is_saved}; }} > /dev/null) || arguments+=("restart=true")',
        "fi",
    ]
    return "\n".join(lines) + "\n\n"


def refuse_without_sbatch() -> None:
    """Raise ConfigError where nothing can be queued."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            [
                "launcher=slurm: there is no sbatch here; call it on a machine of the cluster, or use launcher=local "
                "(--dry-run prints the script)"
            ]
        )


def queue(root: Path, script: str) -> str:
    """Write the script into the folder of the sweep and hand it to `sbatch`; return the number of the array.

    Raises:
        ConfigError: `sbatch` refuses the script, or the folder cannot be written.
    """
    path = root / SCRIPT
    try:
        (root / "slurm").mkdir(parents=True, exist_ok=True)  # for the jobs' output: without it SLURM fails silently
        replace_file(path, script.encode())
    except OSError as error:
        raise ConfigError([f"cannot write to {root}: {error.strerror or error}; pass another run_dir="]) from error
    environment = {**os.environ, "PYTHON": os.environ.get("PYTHON", sys.executable)}
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError([f"sbatch refuses {path}: {done.stderr.strip()}"])
    return done.stdout.strip().partition(";")[0]
