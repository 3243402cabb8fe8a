"""The console side of every command: help, logging, exit codes."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from cdp_repro.cli.streams import command, write_error, write_out
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.paths import typed_path
from cdp_repro.config.source import GROUPS, OURS
from cdp_repro.launch import LaunchError, RankFailedError, StalledError
from cdp_repro.observe.run_directory import RunDirectoryError
from cdp_repro.schedule import ScheduleError
from cdp_repro.schedule.by_name import EntryError
from cdp_repro.schedule.foreign import ForeignError
from cdp_repro.studies.rows import RowError

_LIGHT_MISTAKES = (ConfigError, ScheduleError, ForeignError, EntryError, RunDirectoryError, LaunchError, RowError)
"""Errors for the user's mistakes whose modules do not import torch."""


@dataclass
class ExitCode:
    """The exit code of a command; 1 until it is set."""

    code: int = 1


@contextmanager
def exit_code_of() -> Iterator[ExitCode]:
    """Turn an expected exception of the body into a message and an exit code; raise all others, which are defects."""
    result = ExitCode()
    try:
        yield result
    except _LIGHT_MISTAKES as error:
        result.code = _refuse(error)
    except (RankFailedError, StalledError) as error:
        write_error(_told(f"error: {error}", error))
        stopped = getattr(error, "signal", None)
        result.code = 1 if stopped is None else 128 + stopped
    except KeyboardInterrupt:
        write_error("interrupted\n")
        result.code = 130
    except PermissionError as error:  # even to look whether a file is there needs leave to search its folder
        write_error(f"error: {error.filename}: {error.strerror}: give a path that you may read, or write to\n")
        result.code = 2
    except Exception as error:
        code = _code_of(error)
        if code is None:
            raise
        result.code = code


def _refuse(error: Exception) -> int:
    write_error(_told(f"error: {error}" if "\n" not in str(error) else f"error:\n{error}", error))
    return 2


def _told(text: str, error: BaseException) -> str:
    """Return the text on an error with what has been noted beside it, in lines."""
    return "\n".join([text, *getattr(error, "__notes__", ()), ""])


def _code_of(error: Exception) -> int | None:
    """Report an error with which a run or a model ends; return its exit code, None for a defect.

    To import the error classes is to import torch, which the command has done if one of these is raised. Where it is
    half imported, as after Ctrl-C, it cannot be imported again.
    """
    said = str(error).partition("\n")[0]
    if isinstance(error, MemoryError):
        return _without_memory(said)
    if "torch" not in sys.modules:
        return None
    import torch

    from cdp_repro.data import DatasetError
    from cdp_repro.models import ModelError
    from cdp_repro.training.checkpoint import CheckpointError
    from cdp_repro.training.divergence import DivergedError
    from cdp_repro.training.trainer import Interrupted

    if isinstance(error, (DatasetError, ModelError, CheckpointError)):
        return _refuse(error)
    if isinstance(error, Interrupted):
        write_error(_told(str(error), error))
        return 128 + error.signal
    if isinstance(error, DivergedError):
        write_error(_told(f"error: {error}", error))
        return 1
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said:
        return _without_memory(said)
    return None


def _without_memory(said: str) -> int:
    write_error(f"error: not enough memory: {said}\ncdp-plan shows the need: less with a smaller batch_size=\n")
    return 1


def console_logging() -> None:
    """Show the log of the package as plain lines on standard error."""
    logger = logging.getLogger("cdp_repro")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        handler.setLevel(logging.INFO)  # lower levels go to the log files only
        logger.addHandler(handler)
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it would report that it builds its cache


_WIDTH = 80
"""Of a terminal, if nobody widens it."""
_LABEL_WIDTH = 31


_INSTALLED = "installed: what a package of yours has entered in its pyproject.toml, chosen by its name, as in mode=NAME"


def help_text(usage: str) -> str:
    """Return the usage, the choices of each group, and every value with its default and meaning."""
    groups = "\n".join(wrapped(f"  {group:<11} {' | '.join(OURS.choices(group))}", 14) for group in GROUPS)
    groups += "\n\n" + wrapped(f"  {_INSTALLED}", 2)
    return f"{usage}\nGroups (group=choice):\n{groups}\n\nValues (key=value):\n{values_text(compose_config([]))}"


def wrapped(text: str, indent: int) -> str:
    """Return a line of many words as lines, from the second on indented."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def values_text(config: Any, prefix: str = "") -> str:
    """Return lines for every value of a configuration: key, value and meaning. Nested values have dotted keys.

    `config` is a dataclass; a string below each field gives its meaning. `prefix` is put before all keys.
    """
    explained = _field_docs(type(config))
    text = ""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            text += values_text(value, f"{prefix}{field.name}.")
            continue
        label = f"  {prefix}{field.name}={'' if value is None else value}"
        meaning = textwrap.wrap(explained[field.name], _WIDTH - _LABEL_WIDTH)
        if len(label) > _LABEL_WIDTH - 2:  # no room for a gap
            text += f"{label}\n"
            label = ""
        text += "".join(
            f"{start:<{_LABEL_WIDTH}}{line}\n" for start, line in zip_longest([label], meaning, fillvalue="")
        )
    return text


def _field_docs(kind: type) -> dict[str, str]:
    """Return, by field of a class, the string below it in the source; blanks and newlines become one blank."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for statement, following in pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


@command
def run_script(documentation: str, main: Callable[[list[str]], None], arguments: Sequence[str]) -> int:
    """Run a script as commands run: `--help` shows its documentation; the user's mistakes give a message and code 2."""
    if {"--help", "-h"} & set(arguments):
        write_out(documentation.lstrip())
        return 0
    with exit_code_of() as result:
        unknown = [text for text in arguments if text.startswith("-")]
        if unknown:
            raise ConfigError([f"unknown option {unknown[0]}: see --help"])
        main([*arguments])
        result.code = 0
    return result.code


def only_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that is a script's only argument, if there is one; raise ConfigError for anything else."""
    if len(arguments) > 1:
        raise ConfigError([f"one folder is wanted, not {len(arguments)}: {' '.join(arguments)}"])
    folder = Path(typed_path(arguments[0])) if arguments else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError([f"{folder} is a file: give a folder"])
    return folder


def made_folder(arguments: Sequence[str], otherwise: Path) -> Path:
    """Make the folder that is a script's only argument, or else `otherwise`, and return it.

    Raises:
        ConfigError: there are other arguments, or the folder cannot be made.
    """
    folder = only_folder(arguments) or otherwise
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"cannot make the folder {folder}: {error.strerror}: give another one"]) from error
    return folder
