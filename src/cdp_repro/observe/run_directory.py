"""The run directory: one folder with all records of a run.

run_dir/
  config.yaml          resolved configuration with which it began; makes the directory a run directory
  command.txt          one shell-quoted line per start or resume
  metrics.jsonl        one JSON object per line, with "step"
  summary.json         final numbers, keys with units; the configuration with which it ended
  trace.json           timeline for Perfetto
  memory.csv comms.csv
  checkpoints/  logs/rank{k}.log  wandb/
  diverged/            state of a run whose loss is no longer finite
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cdp_repro.observe.atomic_file import replace_file, unfinished
from cdp_repro.observe.json_values import from_json, valid_json
from cdp_repro.observe.locked_folder import is_locked
from cdp_repro.observe.text import several

CONFIG, COMMAND, METRICS, SUMMARY = "config.yaml", "command.txt", "metrics.jsonl", "summary.json"
CHECKPOINTS, LOGS = "checkpoints", "logs"
SWEEP = "sweep.json"
"""In the folder of a sweep: what lists its cells, whose run directories lie beside it."""
_LONGEST = 4000
"""Bytes; Linux accepts paths of 4095, and those of checkpoints are longer than that of their run."""
_CLAIM = ".claim"
_UNBEGUN = {_CLAIM, COMMAND, *(unfinished(Path(name)).name for name in (COMMAND, CONFIG))}
"""Files that a run may have before its configuration; the claim is always among them."""
SAVED = (f"{CHECKPOINTS}/step-*", f"{CHECKPOINTS}/.replaced-step-*")
"""Where checkpoints are; the second is the old copy of a step that is being saved again."""
_LOCK = ".lock"
"""In the folder of logs; locked by the process that trains."""
_LOOK_SECONDS = 1.0
"""More than a process takes that looks whether a run is being trained, for which it locks the run for a moment."""
_WITHOUT_IT = "Delete it: the run then goes on from its newest checkpoint"


class RunDirectoryError(ValueError):
    """A run directory or a file in it cannot be used; the message names its content and a value that works."""


class RunDirectory:
    """Names and files of one run; made by `create` for a new run and by `open` for one that goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: os.stat_result | None = None
        """What tells the directory that this process has locked from any other."""

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], command: Sequence[str]) -> RunDirectory:
        """Make the directory of a new run, with config.yaml and command.txt.

        `config` is plain data without interpolations. An empty directory may exist already.
        Raises RunDirectoryError, leaving everything as it was, if `path` holds anything, is too long or cannot be
        written.
        """
        run = cls(Path(path).absolute())
        if (length := len(os.fsencode(run.path))) > _LONGEST:
            raise RunDirectoryError(
                f"the path of the run directory {str(run.path)[:20]}... has {length} bytes, and its files need more: "
                f"use at most {_LONGEST}"
            )
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        missing: list[Path] = []
        try:
            missing = _missing(run.path)
            _refuse_occupied(run.path)
            run.path.mkdir(parents=True, exist_ok=True)
            with run._claimed():
                run._fill(text, command)
        except RunDirectoryError:
            _remove_empty(missing)
            raise
        except OSError as error:
            _remove_empty(missing)
            raise RunDirectoryError(
                f"cannot make the run directory {run.path}: {error.strerror or error}. "
                "Pass run_dir=<a folder that can be written>"
            ) from error
        return run

    @property
    def sweep(self) -> str | None:
        """The name of the sweep of which the run is a cell; None if it is of none."""
        folder = self.path.parent
        return folder.name if (folder / SWEEP).exists() else None

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of an earlier run, to resume it. Raises RunDirectoryError if it is not one."""
        run = cls(Path(path).absolute())
        if not (run.path / CONFIG).exists():
            and_no = f", and no {CONFIG}" if run.path.is_dir() else ""
            raise RunDirectoryError(
                f"{run.path} is not a run directory: it {_contents(run.path)}{and_no}{_above(run.path)}"
            )
        run._refuse_damaged()
        run.config()  # refuses what cannot be read
        return run

    @contextmanager
    def locked(self) -> Iterator[RunDirectory]:
        """Keep other processes from training in this directory; the lock ends with the process, however it ends.

        Raises RunDirectoryError if one does already, or nothing can be written.
        """
        with writing(self.path):
            (self.path / LOGS).mkdir(exist_ok=True)
            file = (self.path / LOGS / _LOCK).open("w")
        with file:
            try:
                _lock(file)
            except BlockingIOError as error:
                raise RunDirectoryError(
                    f"another process is training in {self.path}: wait for it, or stop it"
                ) from error
            except OSError as error:
                raise RunDirectoryError(
                    f"{self.path} cannot be locked: {error.strerror or error}. Pass a run_dir= that can be"
                ) from error
            self._locked = self.path.stat()
            try:
                yield self
            finally:
                self._locked = None

    def refuse_replaced(self) -> None:
        """Raise RunDirectoryError if the directory that this process has locked is gone: another run may be there."""
        if self._locked is None:
            return
        try:
            is_there = os.path.samestat(self._locked, self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:
            return  # whoever writes will tell
        if not is_there:
            raise RunDirectoryError(
                f"{self.path} was moved, removed or replaced while this run trained in it: it gets no more files"
            )

    def add_command(self, command: Sequence[str]) -> None:
        """Append a command line, shell-quoted, to command.txt."""
        with writing(self.path / COMMAND), (self.path / COMMAND).open("ab") as file:
            file.write(_line(command))

    def commands(self) -> list[str]:
        """The lines of command.txt; bytes that are no text are as in the arguments of a process."""
        return (self.path / COMMAND).read_text(encoding="utf-8", errors="surrogateescape").splitlines()

    def config(self) -> dict[str, Any]:
        """The configuration in config.yaml as plain data. Raises RunDirectoryError if it cannot be read."""
        try:
            config = OmegaConf.to_container(OmegaConf.load(self.path / CONFIG), resolve=False)
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise RunDirectoryError(f"{self.path / CONFIG} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise RunDirectoryError(f"{self.path / CONFIG} holds a {type(config).__name__}, expected settings by name")
        if not config:
            raise RunDirectoryError(f"{self.path / CONFIG} is empty: put back what it held, or begin another run")
        return {str(key): value for key, value in config.items()}

    def config_at_end(self) -> dict[str, Any]:
        """The configuration with which the run has ended, as plain data: it may have gone on on another placement.

        A run without a summary, or with one of an older version, says only with which it began.
        """
        found = self.summary().get("config")
        return found if isinstance(found, dict) else self.config()

    @property
    def metrics_path(self) -> Path:
        """JSON lines, one row per logged step."""
        return self.path / METRICS

    @property
    def summary_path(self) -> Path:
        """Final numbers as one JSON object."""
        return self.path / SUMMARY

    @property
    def trace_path(self) -> Path:
        """Timeline in Chrome/Perfetto format."""
        return self.path / "trace.json"

    @property
    def memory_path(self) -> Path:
        """Activation bytes per slot."""
        return self.path / "memory.csv"

    @property
    def comms_path(self) -> Path:
        """One line per message."""
        return self.path / "comms.csv"

    @property
    def checkpoints_path(self) -> Path:
        """Directory for a CheckpointStore."""
        return self.path / CHECKPOINTS

    def log_path(self, rank: int) -> Path:
        """Log file of one process."""
        return self.path / LOGS / f"rank{rank}.log"

    def summary(self) -> dict[str, Any]:
        """Return summary.json, with NaN and Infinity as floats; empty if there is none yet."""
        if not self.summary_path.exists():
            return {}
        try:
            summary = json.loads(self.summary_path.read_bytes())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.summary_path} cannot be read: {error}. {_WITHOUT_IT}") from error
        if not isinstance(summary, dict):
            found = type(summary).__name__
            raise RunDirectoryError(f"{self.summary_path} holds a {found}, not a JSON object. {_WITHOUT_IT}")
        return {key: from_json(value) for key, value in summary.items()}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json at once; NaN and Infinity become strings."""
        self.refuse_replaced()
        text = json.dumps(valid_json(summary), indent=2, allow_nan=False) + "\n"
        with writing(self.summary_path):
            replace_file(self.summary_path, text.encode())

    def _refuse_damaged(self) -> None:
        """Raise RunDirectoryError if there is a file in place of a folder, the other way round, or a dangling link."""
        for path in (self.path / name for name in (CONFIG, COMMAND, METRICS, SUMMARY, CHECKPOINTS, LOGS)):
            is_as_expected = path.is_dir() if path.name in (CHECKPOINTS, LOGS) else path.is_file()
            if is_as_expected or not os.path.lexists(path):
                continue
            if not path.exists():
                found = "is a link that leads to nothing"
            elif path.is_dir():
                found = "is a folder, expected a file"
            else:
                found = "is a file, expected a folder" if path.is_file() else "is no regular file"
            raise RunDirectoryError(f"{path} {found}: move it away to go on")

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Keep other processes from beginning a run here during the body; a kill ends the claim."""
        claim = self.path / _CLAIM
        with claim.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                _refuse_occupied(self.path)  # by a run that has begun since the first look
                yield
            finally:
                claim.unlink(missing_ok=True)

    def _fill(self, config: str, command: Sequence[str]) -> None:
        """Write the files of a new run; the run exists from the moment its configuration is there, whole."""
        try:
            with writing(self.path):
                replace_file(self.path / COMMAND, _line(command))
                replace_file(self.path / CONFIG, config.encode())
                for folder in (self.checkpoints_path, self.path / LOGS):
                    folder.mkdir()
        except RunDirectoryError:
            for name in (CONFIG, COMMAND):
                (self.path / name).unlink(missing_ok=True)
            _remove_empty([self.checkpoints_path, self.path / LOGS])
            raise


def _lock(file: IO[str]) -> None:
    """Lock a file; raise BlockingIOError if a process has it for longer than one that only looks whether it is."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _line(command: Sequence[str]) -> bytes:
    return f"{shlex.join(command)}\n".encode(errors="surrogateescape")  # as it was typed: a name in it may be no text


def _is_unbegun(path: Path) -> bool:
    """Whether `path` is an empty directory, or holds only what a killed `create` leaves."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
    return not names or (_CLAIM in names and names <= _UNBEGUN)


def _refuse_occupied(path: Path) -> None:
    """Raise RunDirectoryError if another run has begun at `path`, or something else is there."""
    if not path.exists() or _is_unbegun(path):
        return
    if (path / CONFIG).exists() or (path / METRICS).exists():
        holds = "already holds another run"
        ways = f"pass another run_dir=, or go on with that run by {shlex.join(arguments_to_go_on(path))}"
        if is_trained(path):
            ways = "pass another run_dir=: another process is training in this one"
    else:
        holds, ways = "is taken", "pass another run_dir=, or resume=<the directory of an earlier run>"
    raise RunDirectoryError(f"{path} {holds}: it {_contents(path)}. Nothing was changed; {ways}")


def is_trained(path: Path) -> bool:
    """Return whether a process trains in a run directory now."""
    return is_locked(path / LOGS / _LOCK)


def _contents(path: Path) -> str:
    """Describe the content of `path`, as the end of a sentence that starts with "it"."""
    if not path.is_dir():
        return "is a file" if path.exists() else "does not exist"
    names = sorted(entry.name for entry in path.iterdir())
    return f"holds {several(names)}" if names else "is empty"


def _above(path: Path) -> str:
    """What to give in place of `path`, ready to paste: the run directory that it lies in, if there is one."""
    run = next((parent for parent in path.parents if (parent / CONFIG).is_file()), None)
    return f"; it lies in one: give {shlex.quote(str(run))}" if run else "; give the directory of an earlier run"


def _missing(path: Path) -> list[Path]:
    """`path` and its parents as far as they do not exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RunDirectoryError, with the free space, if the body cannot write to `path`."""
    try:
        yield
    except OSError as error:
        folder = next(each for each in (path, *path.parents) if each.is_dir())  # that of the file may not exist
        free = f"{shutil.disk_usage(folder).free:,} bytes free"
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror or error} ({free})") from error


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the folder of the newest checkpoint of a run, judged by its name; None if it has none."""
    found = [path for pattern in SAVED for path in directory.glob(pattern)]
    return max(found, key=lambda path: path.name.removeprefix(".replaced-"), default=None)


def arguments_to_go_on(directory: Path) -> list[str]:
    """Return the arguments of `cdp-train` with which a run goes on, from its start if it has no checkpoint."""
    return [f"resume={directory}", *([] if newest_checkpoint(directory) else ["restart=true"])]
