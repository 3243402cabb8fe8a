"""`cdp-train`: train a network by data parallelism or cyclic data parallelism."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cdp_repro.cli.console import console_logging, exit_code_of, help_text, split_flags
from cdp_repro.cli.streams import OutputError, command, write_error, write_out
from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.config.compose import compose_config, expand_sweep
from cdp_repro.config.keys import RESUME_KEYS, settings_of
from cdp_repro.config.paths import typed_path
from cdp_repro.config.task import task_of
from cdp_repro.launch import launch
from cdp_repro.launch.signals import StopRequest
from cdp_repro.launch.train_process import train_in_process
from cdp_repro.observe.run_directory import CONFIG, SUMMARY, RunDirectory, RunDirectoryError
from cdp_repro.observe.text import format_bytes
from cdp_repro.training.run import arguments_to_go_on, train

USAGE = """usage: cdp-train [--multirun] [key=value ...]

Train a network on the timeline of data parallelism (mode=dp) or of cyclic data parallelism
(mode=cdp_v1, mode=cdp_v2), and record accuracy, activation memory and the timeline.

  cdp-train                                        handwritten digits, under a minute on two cores
  cdp-train mode=cdp_v1 dataset=cifar10            CIFAR-10 from data/ (dataset.root=/else/where)
  cdp-train mode='[[1,1],[1,0]]' workers=2         any staleness matrix that the timeline can serve
  cdp-train experiment=paper/cifar10_resnet18      the paper's set-up
  cdp-train dataset=text model=gpt optim=adamw     a language model on Python's own library (dataset.root=FILE)
  cdp-train mode=cdp_v1 delay=error_feedback       a method that makes up for stale reads
  cdp-train --multirun mode=dp,cdp_v1,cdp_v2 seed=0,1,2
  cdp-train mode=cdp_v2 placement=pipeline         in processes of its own, or under torchrun and srun
  cdp-train resume=runs/my-run                     go on from the newest checkpoint, bitwise
  cdp-train resume=runs/my-run restart=true        begin anew a run that was stopped before its first checkpoint
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for the user's mistakes, 130 after Ctrl-C, 1 otherwise."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags, overrides, unknown = split_flags(arguments, ("--help", "-h", "--multirun", "-m"))
    if unknown:
        write_error(f"unknown option {unknown[0]}\n\n{USAGE}")
        return 2
    if flags & {"--help", "-h"}:
        write_out(help_text(USAGE))
        return 0
    with exit_code_of() as result:
        result.code = _sweep(overrides) if flags & {"--multirun", "-m"} else _single(overrides)
    return result.code


def _single(overrides: Sequence[str]) -> int:
    resumed = _run_to_resume(overrides)
    config = _resumed_config(resumed, overrides) if resumed else compose_config(overrides)
    run_dir = resumed.path if resumed else Path(config.run_dir or _new_run_dir(config))
    arguments = (config, run_dir, ["cdp-train", *overrides], resumed is not None, _restarts(overrides))
    summary = launch(_train_rank, arguments, config.processes)
    if summary:
        with suppress(OutputError):  # the run has ended well, and its files say so
            write_out(_summary_text(summary, run_dir))
    return 0


def _train_rank(
    config: RunConfig, run_dir: Path, command: Sequence[str], resume: bool, restart: bool
) -> dict[str, Any]:
    """Train in one rank; only rank 0 logs to the console."""
    if os.environ.get("RANK", "0") == "0":
        console_logging()
    return train(config, run_dir, command, resume, restart)


def _run_to_resume(overrides: Sequence[str]) -> RunDirectory | None:
    """Return the run that `resume=` names, if it is given; only `RESUME_KEYS` and `placement=` may stand beside it."""
    resume = [text.partition("=")[2] for text in overrides if text.startswith("resume=")]
    if not resume:
        return None
    if not resume[-1]:
        raise ConfigError(["resume= names no run directory: give one, e.g. resume=runs/my-run"])
    others = [
        text for text in overrides if text.partition("=")[0] not in ("resume", "restart", "placement", *RESUME_KEYS)
    ]
    if others:
        raise ConfigError(
            [
                f"resume= goes on with the run's own configuration; drop {shlex.join(others)} "
                f"(only restart, placement, {', '.join(RESUME_KEYS)} may be given)"
            ]
        )
    return RunDirectory.open(Path(typed_path(resume[-1])))


def _restarts(overrides: Sequence[str]) -> bool:
    """Return whether `restart=true` stands beside `resume=`."""
    given = [text.partition("=")[2].lower() for text in overrides if text.startswith("restart=")]
    if given and given[-1] not in ("true", "false"):
        raise ConfigError([f"restart={given[-1]}: use restart=true, or leave it out"])
    return bool(given) and given[-1] == "true"


def _resumed_config(run: RunDirectory, overrides: Sequence[str]) -> RunConfig:
    """Return the run's own configuration with the overrides that may be given beside `resume=`."""
    given = [
        text.replace("placement=", "placement.name=")
        for text in overrides
        if not text.startswith(("resume=", "restart="))
    ]
    config = OmegaConf.create(run.config())
    try:
        config.merge_with_dotlist(given)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([f"{shlex.join(given)}: {str(error).splitlines()[0]}"]) from error
    if config.placement.name != "pipeline" and not any(text.startswith("ranks=") for text in given):
        config.ranks = None  # those of the pipeline that it was
    return load_config(config)


def _new_run_dir(config: RunConfig) -> Path:
    """Return a directory that does not exist yet, named after data set, model, mode, seed and time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    base = f"{config.dataset.name}-{config.model.name}-{config.mode.name}-seed{config.seed}-{stamp}"
    names = (base if number == 1 else f"{base}-{number}" for number in range(1, 1000))
    return next(path for name in names if not (path := Path("runs") / name).exists())


def _sweep(overrides: Sequence[str]) -> int:
    """Run every cell in a process of its own, in its own directory; go on after failures and list them at the end.

    Cells that are finished are skipped, and those that were stopped go on, so that a sweep can be repeated.
    """
    console_logging()
    base = [text.partition("=")[2] for text in overrides if text.startswith("run_dir=")]
    root = Path(typed_path(base[-1]) if base else f"runs/sweep-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    cells = _cells(root, [text for text in overrides if not text.startswith("run_dir=")])
    failures = []
    with StopRequest() as stop:
        for number, (run_dir, cell) in enumerate(cells.items(), start=1):
            logging.getLogger("cdp_repro").info("[%d/%d] %s", number, len(cells), run_dir.name)
            resume = (run_dir / CONFIG).exists()
            arguments = arguments_to_go_on(run_dir) if resume else [*cell, f"run_dir={run_dir}"]
            code = train_in_process(arguments, stop)
            if stop.signal is not None:
                return 128 + stop.signal
            if code:
                failures.append(f"exit code {code}: {run_dir.name} (see {run_dir})")
    for failure in failures:
        write_error(f"{failure}\n")
    write_out(f"{len(cells) - len(failures)} of {len(cells)} runs finished, in {root}\n")
    return 1 if failures else 0


def _cells(root: Path, overrides: Sequence[str]) -> dict[Path, list[str]]:
    """Return the overrides of every cell by its directory; ConfigError with the mistakes of all cells."""
    cells = expand_sweep(overrides)
    fixed = set.intersection(*map(set, cells))
    found: dict[Path, list[str]] = {}
    problems: dict[str, None] = {}
    for cell in cells:
        name = ",".join(text for text in cell if text not in fixed).replace("/", "-") or "single"
        if root / name in found:
            problems[f"two cells are the same: {name}"] = None
        found[root / name] = cell
        try:
            config = settings_of(compose_config(cell).to_dict())
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        begun = (root / name / CONFIG).exists()
        if begun and {**settings_of(RunDirectory(root / name).config()), "run_dir": None} != config:
            problems[f"{root / name} holds a run with another configuration: pass another run_dir="] = None
    if problems:
        raise ConfigError(problems)
    return found


def _summary_text(summary: dict[str, Any], run_dir: Path) -> str:
    try:
        return _told(summary)
    except KeyError as error:
        raise RunDirectoryError(
            f"{run_dir / SUMMARY} says that the run is finished, but lacks {error}: delete it, and the run goes on "
            "from its newest checkpoint"
        ) from error


def _told(summary: dict[str, Any]) -> str:
    task = task_of(summary["dataset"])
    lines = [
        "",
        f"{summary['model']} on {summary['dataset/description']}, mode {summary['mode']}, {summary['workers']} workers",
        f"  {task.name:<21} {task.score_text(summary)} after {summary['epochs']} epochs",
    ]
    peak = summary.get("memory/activation_peak_bytes_total")
    baseline = summary["memory/activation_peak_bytes_simulated_dp"]
    if peak:
        ranks = summary["ranks"]
        over = f", over {ranks} processes" if ranks > 1 else ""
        lines.append(f"  activation peak       {format_bytes(peak)} measured{over}")
        lines.append(f"  data parallelism      {format_bytes(baseline)} simulated; ratio {peak / baseline:.3f}")
    if sent := summary.get("comm/bytes_per_device_per_step"):
        lines.append(f"  sent per device       {format_bytes(sent)} a training step")
    if reads := summary["ledger/reads"]:
        lines.append(f"  reads in the ledger   {reads}, all at the version that the rule asks for")
    lines.append(f"  run directory         {summary['run_dir']}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
