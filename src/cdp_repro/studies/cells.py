"""A sweep of `cdp-train`: its cells, each a run with a directory of its own, and the file that lists them.

<sweep>/sweep.json      what each cell is, for those who look later; written when it is started
<sweep>/<cell>/         the run directory of a cell, named after the overrides in which it differs; cut if too long
<sweep>/<cell>.log      what its processes printed, where several run at once; locked while one trains (`locked_log`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.errors import refuse
from cdp_repro.config.keys import changeable, is_changeable, settings_of
from cdp_repro.config.paths import LONGEST_NAME, shortened
from cdp_repro.config.program_file import with_absolute_program
from cdp_repro.config.source import Source
from cdp_repro.config.sweep_cells import expand_sweep
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.locked_folder import alone_in
from cdp_repro.observe.run_directory import CONFIG, SWEEP, RunDirectory, RunDirectoryError, arguments_to_go_on
from cdp_repro.observe.text import several
from cdp_repro.studies.locked_log import log_path

FORMAT, VERSION = "cdp-repro sweep", 1


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    directory: Path
    begin: Sequence[str]
    """Arguments of `cdp-train` that begin it."""
    config: RunConfig

    @property
    def name(self) -> str:
        """The overrides in which it differs from others."""
        return self.directory.name

    @property
    def log(self) -> Path:
        """File for what its processes print."""
        return log_path(self.directory)

    @property
    def is_finished(self) -> bool:
        """Whether its run has finished; one whose summary is damaged says so itself when it goes on."""
        with suppress(RunDirectoryError):
            return RunDirectory(self.directory).summary().get("status") == "finished"
        return False

    def arguments(self) -> list[str]:
        """Return the arguments of `cdp-train` that begin it, or go on with it."""
        if not (self.directory / CONFIG).exists():
            return [*self.begin]
        return [*arguments_to_go_on(self.directory), *changeable(self.begin)]


def cells_of(root: Path, overrides: Sequence[str], source: Source, check_device: bool = True) -> list[Cell]:
    """Return the cells of a sweep; `check_device` as in `load_config`.

    Raises:
        ConfigError: lists the mistakes of all cells, and directories that hold another run.
    """
    expanded = expand_sweep(overrides, source)
    fixed = set.intersection(*map(set, expanded))
    found: dict[Path, Cell] = {}
    names: dict[str, str] = {}
    problems: list[str] = []
    mistakes: dict[str, list[str]] = {}
    """Mistakes in configurations, each with its cells."""
    for texts in expanded:
        own = ",".join(text for text in texts if text not in fixed) or "single"
        name = own.replace("/", "-")
        if names.setdefault(name, own) != own:  # such as `dataset.root=a/b` and `dataset.root=a-b`
            name += f"-{hashlib.sha256(own.encode()).hexdigest()[:8]}"
        directory = root / shortened(name, LONGEST_NAME - len(".log"))  # the end of its log's name
        if directory in found:
            which = "all cells are one" if name == "single" else f"two cells are the same ({name})"
            problems.append(f"{which}: a sweep gives a value twice")
        try:
            config = with_absolute_program(compose_config(texts, check_device, source))
        except ConfigError as error:
            for mistake in error.problems:
                mistakes.setdefault(mistake, []).append(own)
            continue
        begin = [*source.arguments(), *texts, *_absolute_paths(config), f"run_dir={directory}"]
        found[directory] = Cell(directory, begin, config)
        if _holds_another_run(directory, config):
            problems.append(f"{directory} holds a run with another configuration: pass another run_dir=")
    for mistake, where in mistakes.items():
        cells = several(where, limit=1)
        is_said = len(where) == len(expanded) or mistake.startswith(cells)
        problems.append(mistake if is_said else f"{cells}: {mistake}")
    if root.exists() and not root.is_dir():
        problems.append(f"run_dir={root} is a file: a sweep needs a folder for its runs")
    if (root / CONFIG).exists():
        problems.append(f"run_dir={root} is the directory of a run: a sweep needs a folder of its own for its runs")
    refuse(problems)
    return [*found.values()]


def _absolute_paths(config: RunConfig) -> list[str]:
    """Return the overrides by which a run keeps where its files lie: the sweep may be repeated in another folder."""
    typed = {"dataset.root": config.dataset.root, "model.weights": config.model.weights}
    return [f"{key}={path}" for key, text in typed.items() if (path := _absolute(text)) != text]


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path else path


def _holds_another_run(directory: Path, config: RunConfig) -> bool:
    if not (directory / CONFIG).exists():
        return False
    theirs, ours = map(settings_of, (RunDirectory(directory).config(), config.to_dict()))
    for each in (theirs, ours):
        each["model.weights"] = _absolute(each["model.weights"])  # older versions have kept it as it was typed
    return any(
        theirs.get(key) != ours.get(key)
        for key in theirs.keys() | ours.keys()
        if key != "run_dir" and not is_changeable(key)
    )


def refuse_other_data(cells: Sequence[Cell]) -> None:
    """Refuse cells whose runs so far are on other data: a finished one would pass for one on those that are given.

    Data are read only if they do not lie where a run has found its own, and once for all cells.

    Raises:
        ConfigError: lists these cells.
        DatasetError: the data cannot be read.
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    for cell in cells:
        noted = _noted_elsewhere(cell)
        if noted is None:
            continue
        from cdp_repro.training.assembly import load_data  # here: torch takes seconds

        which = repr((cell.config.dataset, cell.config.model.context))
        found[which] = found.get(which) or load_data(cell.config).fingerprint()
        if noted.get("dataset/fingerprint") != found[which]:
            other = f"another configuration, on other data ({noted.get('dataset/description', 'unknown')})"
            problems.append(f"{cell.directory} holds a run with {other}: pass another run_dir=")
    refuse(problems)


def _noted_elsewhere(cell: Cell) -> Mapping[str, Any] | None:
    """Return the summary of a cell's run if its data lie elsewhere now; else, and if it has none, None.

    A run without a summary, or with a damaged one, tells it itself when it goes on.
    """
    run = RunDirectory(cell.directory)
    with suppress(RunDirectoryError):
        if noted := run.summary():
            lay = settings_of(run.config_at_end())["dataset.root"]
            return noted if lay != _absolute(cell.config.dataset.root) else None
    return None


@dataclass(frozen=True)
class SweepList:
    """What `sweep.json` says."""

    epochs: Mapping[str, int]
    """Epochs of each cell, by its name."""
    arrays: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the cells of each queued SLURM array, by the number of the array."""

    def job_outputs(self, root: Path, name: str) -> list[Path]:
        """Return the files to which SLURM writes the output of a cell's jobs, the newest first."""
        jobs = [(array, names.index(name)) for array, names in self.arrays.items() if name in names]
        return [root / "slurm" / f"{array}_{index}.log" for array, index in reversed(jobs)]


def write_list(root: Path, cells: Sequence[Cell], array: str | None = None) -> None:
    """Add the cells of a sweep to those that were started there before, with the array that was queued for them.

    Raises:
        ConfigError: the folder cannot be written, or is of another version.
    """
    try:
        with alone_in(root):  # else one sweep would lose what another that starts here now has added
            before = read_list(root) if (root / SWEEP).exists() else SweepList({})
            epochs = {**before.epochs, **{cell.name: cell.config.epochs for cell in cells}}
            arrays = {**before.arrays, **({array: [cell.name for cell in cells]} if array else {})}
            content = {"format": FORMAT, "version": VERSION, "epochs": epochs, "arrays": arrays}
            replace_file(root / SWEEP, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError([f"cannot write to {root}: {error.strerror or error}; pass another run_dir="]) from error


def read_list(root: Path) -> SweepList:
    """Return what was noted about a sweep.

    Raises:
        ConfigError: the folder is not of a sweep, or of one of another version, or the file is damaged.
    """
    path = root / SWEEP
    way_on = f"delete it and start the sweep again with run_dir={root}, which keeps its runs"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        found = f"it has no {SWEEP}" if root.is_dir() else "it does not exist" if not root.exists() else "it is a file"
        raise ConfigError([f"{root} is no folder of a sweep: {found}"]) from error
    except ValueError as error:
        raise ConfigError([f"{path} is damaged: {error}; {way_on}"]) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError([f"{path} is not of a sweep of cdp-train"])
    if found.get("version") != VERSION:
        raise ConfigError(
            [f"{path} is of version {found.get('version')}, this program reads {VERSION}: use the one that wrote it"]
        )
    for key, kind in (("epochs", int), ("arrays", list)):
        value = found.get(key)
        if not isinstance(value, dict) or not all(isinstance(each, kind) for each in value.values()):
            raise ConfigError([f"{path} is damaged: it has no cells by name in {key!r}; {way_on}"])
    return SweepList(found["epochs"], found["arrays"])
