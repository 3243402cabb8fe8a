"""`cdp-train`: train a network by data parallelism or cyclic data parallelism."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cdp_repro.cli.command_line import Command, CommandLine
from cdp_repro.cli.console import console_logging, values_text
from cdp_repro.cli.entry import end_with
from cdp_repro.cli.streams import OutputError, command, write_error, write_out
from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.config.compose import compose_config, output_folder
from cdp_repro.config.errors import collecting, refuse
from cdp_repro.config.keys import RESUME_KEYS
from cdp_repro.config.paths import PATH_KEYS, typed_path, typed_path_or_none
from cdp_repro.config.program_file import with_absolute_program
from cdp_repro.config.source import Source
from cdp_repro.config.sweep_launcher import LAUNCHERS, Launcher, LocalLauncher, SlurmLauncher, launcher_of, of_runs
from cdp_repro.config.task import task_of
from cdp_repro.launch import RankFailedError, StalledError, is_rank_0, launch, refuse_several
from cdp_repro.observe.run_directory import (
    CONFIG,
    LOGS,
    SUMMARY,
    RunDirectory,
    RunDirectoryError,
    arguments_to_go_on,
    newest_checkpoint,
)
from cdp_repro.observe.text import format_bytes, mode_text
from cdp_repro.schedule import PLACEMENT_SIZES
from cdp_repro.schedule.garbage import without_collection
from cdp_repro.studies.cells import Cell, cells_of, refuse_other_data, write_list
from cdp_repro.studies.start_cells import array_script, queue, refuse_without_sbatch, train_here
from cdp_repro.studies.sweep_status import sweep_text
from cdp_repro.training.rank_imports import rank_imports

USAGE = """usage: cdp-train [option ...] [key=value ...]
       cdp-train --multirun [--dry-run] [launcher=local|slurm]
                 [launcher.key=value ...] key=value,value ...
       cdp-train --status=SWEEP_DIRECTORY

Train a network on the timeline of data parallelism (mode=dp) or of cyclic data
parallelism (mode=cdp_v1, mode=cdp_v2), and record accuracy, activation memory
and the timeline.

  cdp-train                                   handwritten digits, in a minute
  cdp-train mode=cdp_v1 dataset=cifar10       CIFAR-10 (dataset.root=FOLDER)
  cdp-train mode='[[1,1],[1,0]]' workers=2    any staleness that can be served
  cdp-train experiment=paper/cifar10_resnet18       the paper's set-up
  cdp-train dataset=text model=gpt optim=adamw      a language model on Python's
                                              own library (dataset.root=FILE)
  cdp-train mode=cdp_v1 delay=error_feedback  makes up for stale reads
  cdp-train mode=cdp_v2 placement=pipeline    in processes of its own, or under
                                              torchrun and srun
  cdp-train resume=runs/my-run                go on from the newest checkpoint,
                                              bitwise
  cdp-train resume=runs/my-run restart=true   begin anew a run that was stopped
                                              before its first checkpoint

Many runs, one after the other or as one array of jobs:

  cdp-train --multirun mode=dp,cdp_v1,cdp_v2 "seed=range(3)"
  cdp-train -m seed=0,1,2 launcher=slurm launcher.partition=gpu
"""


def _run(line: CommandLine) -> int:
    if "status" in line.options:
        return _status(line)
    if "--multirun" in line.flags:
        return _sweep(line)
    if "--dry-run" in line.flags:
        raise ConfigError(["--dry-run shows how a sweep would start: add --multirun"])
    return _single(line.overrides, line.source)


def _single(overrides: Sequence[str], source: Source) -> int:
    resumed = _run_to_resume(overrides)
    config = _resumed_config(resumed, overrides) if resumed else _new_config(overrides, source)
    config = with_absolute_program(config)
    run_dir = resumed.path if resumed else Path(config.run_dir or _new(output_folder("run", overrides, source)))
    arguments = (
        config,
        run_dir,
        ["cdp-train", *source.arguments(), *overrides],
        resumed is not None,
        _restarts(overrides),
    )
    try:
        summary = launch(_train_rank, arguments, config.processes, config.grace_seconds, rank_imports(config))
    except (RankFailedError, StalledError) as error:
        if (run_dir / CONFIG).exists():
            error.add_note(_how_to_go_on(run_dir))
        elif is_rank_0():  # other ranks may have given the run another name
            error.add_note("the run had not begun: nothing is written")
        raise
    if summary:
        try:
            write_out(_summary_text(summary, run_dir))
        except OutputError as error:  # the run itself has ended well
            write_error(f"{error}; {run_dir / SUMMARY} has the numbers\n")
    return 0


def _new_config(overrides: Sequence[str], source: Source) -> RunConfig:
    """Return the configuration of a new run.

    Raises:
        ConfigError: lists all mistakes, among them two names for the folder of the run.
    """
    problems = _two_folders("run", overrides)
    config = RunConfig()
    with collecting(problems):
        config = compose_config(overrides, source=source)
    refuse(problems)
    return config


def _train_rank(
    config: RunConfig, run_dir: Path, command: Sequence[str], resume: bool, restart: bool
) -> dict[str, Any]:
    """Train in one rank; only rank 0 logs to the console."""
    if is_rank_0():
        console_logging()
    with without_collection():  # most of what an import makes stays
        from cdp_repro.training.run import train  # here: torch takes seconds, and mistakes are reported before

    return train(config, run_dir, command, resume, restart)


def _how_to_go_on(run_dir: Path) -> str:
    """Return, as text, the newest checkpoint of a run that failed, the command that resumes it, and its logs."""
    newest = newest_checkpoint(run_dir)
    return (
        f"newest checkpoint: {newest or 'none was due yet'}\n"
        f"go on with: {shlex.join(['cdp-train', *arguments_to_go_on(run_dir.absolute())])}\n"
        f"tracebacks: {run_dir.absolute() / LOGS}"
    )


def _run_to_resume(overrides: Sequence[str]) -> RunDirectory | None:
    """Return the run that `resume=` names, if it is given.

    Raises:
        ConfigError: it names nothing, or anything but `placement=`, `RESUME_KEYS` and a valid `restart=` is beside it.
        RunDirectoryError: it does not name a run directory.
    """
    resume = [text.partition("=")[2] for text in overrides if text.startswith("resume=")]
    if not resume:
        return None
    problems = [] if resume[-1] else ["resume= names no run directory: give one, e.g. resume=runs/my-run"]
    others = [
        text for text in overrides if text.partition("=")[0] not in ("resume", "restart", "placement", *RESUME_KEYS)
    ]
    if others:
        more = any(text.startswith("epochs=") for text in others)
        way = "; for more epochs, begin another run from its weights: cdp-export, then model.weights=" if more else ""
        problems.append(
            f"resume= goes on with the run's own configuration; drop {shlex.join(others)} "
            f"(only restart, placement, {', '.join(RESUME_KEYS)} may be given){way}"
        )
    with collecting(problems):
        _restarts(overrides)  # refuses values other than true and false
    refuse(problems)
    return RunDirectory.open(Path(typed_path(resume[-1])))


def _restarts(overrides: Sequence[str]) -> bool:
    """Return whether `restart=true` stands beside `resume=`."""
    given = [text.partition("=")[2].lower() for text in overrides if text.startswith("restart=")]
    if given and given[-1] not in ("true", "false"):
        raise ConfigError([f"restart={given[-1]}: use restart=true, or leave it out"])
    return bool(given) and given[-1] == "true"


def _resumed_config(run: RunDirectory, overrides: Sequence[str]) -> RunConfig:
    """Return the run's own configuration, changed by the overrides that stand beside `resume=`."""
    given = [text for text in overrides if not text.startswith(("resume=", "restart="))]
    config = OmegaConf.create(run.config())
    if not isinstance(config.get("placement"), DictConfig):
        raise RunDirectoryError(f"{run.path / CONFIG} has no placement: put back what it held, or begin another run")
    was = config.placement.get("name")
    problems, found = list[str](), RunConfig()
    for text in given:
        key, _, value = text.partition("=")
        try:
            if key in PATH_KEYS:
                OmegaConf.update(config, key, typed_path_or_none(value))  # as it is, not as YAML
            else:
                config.merge_with_dotlist([f"{key.replace('placement', 'placement.name')}={value}"])
        except (OmegaConfBaseException, YAMLError) as error:
            problems.append(f"{shlex.quote(text)}: {str(error).splitlines()[0]}")
    for name, placement in PLACEMENT_SIZES.items():
        if config.placement.name != placement and not any(text.startswith(f"{name}=") for text in given):
            config[name] = None  # it was for the placement before
    if config.placement.name != was and not any(text.startswith("program=") for text in given):
        config.program = None  # it was for the placement before, too
    with collecting(problems):
        found = load_config(config, proposes_sizes=False)
    where = "" if given else f"{run.path / CONFIG}: "
    refuse(f"{where}{problem}" for problem in problems)
    return found


def _two_folders(kind: str, overrides: Sequence[str]) -> list[str]:
    """Return a sentence if `run_dir=` and Hydra's own `hydra.<kind>.dir=` both name a folder."""
    given = [text for text in overrides if text.startswith(("run_dir=", f"hydra.{kind}.dir="))]
    twice = len({text.partition("=")[0] for text in given}) > 1
    return [f"{shlex.join(given)} name two folders: give one of them"] if twice else []


def _new(folder: Path) -> Path:
    """Return a folder that does not exist yet: this one, or one with a number after its name."""
    if not folder.name:
        raise ConfigError([f"hydra.run.dir={folder} names no new folder: give one, e.g. run_dir=runs/my-run"])
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def _sweep(line: CommandLine) -> int:
    """Start the cells of a sweep that have not finished, as `launcher=` says; list failures at the end."""
    refuse_several("train the whole sweep")
    console_logging()
    dry = "--dry-run" in line.flags
    launcher, root, cells = _asked_for(line, dry)
    missing = [cell for cell in cells if not cell.is_finished]
    if len(missing) < len(cells):
        write_error(f"{len(cells) - len(missing)} of {len(cells)} runs have finished already\n")
    if isinstance(launcher, SlurmLauncher):
        return _queue(root, cells, missing, launcher, dry)
    if dry:
        write_out("".join(f"{shlex.join(['cdp-train', *cell.arguments()])}\n" for cell in missing))
        return 0
    _check_files(cells)
    write_list(root, cells)
    outcome = train_here(missing, launcher.jobs)
    if outcome.signal is not None:
        write_error(_stopped_text(root, cells, is_named=_folder_of_sweep(line) == root))
        return 128 + outcome.signal
    for failure in outcome.failures:
        write_error(f"{failure}\n")
    write_out(f"{len(cells) - len(outcome.failures)} of {len(cells)} runs finished, in {root}\n")
    return 1 if outcome.failures else 0


def _asked_for(line: CommandLine, dry: bool) -> tuple[Launcher, Path, list[Cell]]:
    """Return how the runs of a sweep start, its folder, and its cells; raise ConfigError that lists all mistakes."""
    overrides, cells = of_runs(line.overrides), list[Cell]()
    problems = _two_folders("sweep", overrides)
    launcher: Launcher | None = None
    with collecting(problems):
        launcher = launcher_of(line.overrides)
    root = Path("runs")  # in its place, to find the mistakes of cells if the folder is wrong
    with collecting(problems):
        root = _folder_of_sweep(line)
    of_cells = [text for text in overrides if not text.startswith("run_dir=")]
    here = isinstance(launcher, LocalLauncher) and not dry  # else another machine may have the device
    with collecting(problems):
        cells = cells_of(root, of_cells, line.source, check_device=here)
    refuse(problems)
    assert launcher is not None
    return launcher, root, cells


def _stopped_text(root: Path, cells: Sequence[Cell], is_named: bool) -> str:
    """Say how far a sweep is, and how it goes on; `is_named` is whether its command line gives this folder again."""
    done = [cell for cell in cells if cell.is_finished]
    beside = "" if is_named else f" with {shlex.quote(f'run_dir={root}')}"
    return f"stopped: {len(done)} of {len(cells)} runs have finished, in {root}; the same command{beside} goes on\n"


def _folder_of_sweep(line: CommandLine) -> Path:
    """Return the folder that the command line gives a sweep; a default one is another at any time."""
    overrides = of_runs(line.overrides)
    given = [text.partition("=")[2] for text in overrides if text.startswith("run_dir=")]
    return Path(typed_path(given[-1])) if given else output_folder("sweep", overrides, line.source)


def _check_files(cells: Sequence[Cell]) -> None:
    """Refuse what only the files of a sweep show, before its first run starts."""
    problems: list[str] = []
    for check in (_check_weights, refuse_other_data):
        with collecting(problems):
            check(cells)
    refuse(problems)


def _check_weights(cells: Sequence[Cell]) -> None:
    """Refuse files of weights that do not fit, before the first run starts; check each model with each file once."""
    configs = [cell.config for cell in cells if cell.config.model.weights is not None]
    different = {repr((config.model, config.dataset.classes, config.input_shape)): config for config in configs}
    problems: list[str] = []
    for config in different.values():
        from cdp_repro.training.weights import check_weights  # here: torch takes seconds

        with collecting(problems):
            check_weights(config)
    refuse(problems)


def _queue(root: Path, cells: Sequence[Cell], missing: Sequence[Cell], launcher: SlurmLauncher, dry: bool) -> int:
    """Queue the missing cells of a sweep as a SLURM array; with `dry`, only print its script."""
    problems, script = list[str](), ""
    with collecting(problems):
        script = array_script(root, missing, launcher) if missing else ""
    for check in () if dry else (refuse_without_sbatch, partial(_check_files, cells)):
        with collecting(problems):
            check()
    refuse(problems)
    if dry:
        write_out(script)
        return 0
    write_list(root, cells)
    if not missing:
        write_out(f"{len(cells)} of {len(cells)} runs finished, in {root}\n")
        return 0
    array = queue(root, script)
    write_list(root, missing, array)
    write_out(f"queued {len(missing)} runs as array {array}: cdp-train --status={shlex.quote(str(root))} shows them\n")
    return 0


def _status(line: CommandLine) -> int:
    if line.overrides or line.flags:
        raise ConfigError([f"--status=SWEEP_DIRECTORY stands alone: drop {shlex.join([*line.overrides, *line.flags])}"])
    write_out(sweep_text(Path(typed_path(line.options["status"]))))
    return 0


def _summary_text(summary: dict[str, Any], run_dir: Path) -> str:
    try:
        return _told(summary, run_dir.absolute())
    except (KeyError, TypeError, ValueError) as error:
        fault = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise RunDirectoryError(
            f"{run_dir / SUMMARY} says that the run is finished, but {fault}: delete it, and the run goes on "
            "from its newest checkpoint"
        ) from error


def _told(summary: dict[str, Any], run_dir: Path) -> str:
    task, mode = task_of(summary["dataset"]), mode_text(summary["mode"], summary.get("delay", "none"))
    lines = [
        "",
        f"{summary['model']} on {summary['dataset/description']}, mode {mode}, {summary['workers']} workers",
        f"  {task.name:<21} {task.score_text(summary)} after {summary['epochs']} "
        f"epoch{'s' if summary['epochs'] > 1 else ''}",
    ]
    peak = summary.get("memory/activation_peak_bytes_total")
    baseline = summary["memory/activation_peak_bytes_simulated_dp"]
    if peak:
        ranks = summary["ranks"]
        over = f", over {ranks} processes" if ranks > 1 else ""
        lines.append(f"  activation peak       {format_bytes(peak)} measured{over}")
        lines.append(f"  data parallelism      {format_bytes(baseline)} simulated; ratio {peak / baseline:.3f}")
    elif not summary.get("baseline"):  # a library's steps cannot be traced
        lines.append("  activation peak       not measured: no training step was traced")
    if sent := summary.get("comm/bytes_per_device_per_step"):
        lines.append(f"  sent per device       {format_bytes(sent)} a training step")
    if reads := summary["ledger/reads"]:
        lines.append(f"  reads in the ledger   {reads}, all at the version that the rule asks for")
    lines.append(f"  run directory         {run_dir}")  # not that in the summary: the run may have been moved
    return "\n".join(lines) + "\n"


def _launcher_help() -> str:
    """Return the part of `--help` on launchers, with the values of each."""
    ways = (f"  launcher={name}\n{values_text(kind(), 'launcher.')}" for name, kind in LAUNCHERS.items())
    return "\nHow the runs of a sweep start (with --multirun):\n" + "".join(ways)


COMMAND = Command("cdp-train", USAGE, _run, ("status",), (("--multirun", "-m"), ("--dry-run",)), _launcher_help)
main = command(COMMAND.main)

if __name__ == "__main__":
    end_with(main)
