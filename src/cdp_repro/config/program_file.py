"""A program file among the settings: its header gives the settings from which the schedule is made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cdp_repro.config.errors import ConfigError
from cdp_repro.config.paths import typed_path
from cdp_repro.config.schema import RunConfig
from cdp_repro.schedule import Program
from cdp_repro.schedule.program_text import read_program

_KEY = "program="
_PLAIN = re.compile(r"[a-z_0-9]+")
"""Matches values that are typed in one way only, so that they can be compared as text."""


def read_program_file(path: str) -> Program:
    """Return the program of a file, checked.

    Raises:
        ConfigError: the file cannot be read.
        ScheduleError: the program is broken; the message says in which line and why.
    """
    if not path:
        raise ConfigError(["program= names no file: give one of cdp-plan --program=FILE, or leave it out"])
    if Path(path).exists() and not Path(path).is_file():  # a pipe can be read only once, but every rank reads
        raise ConfigError([f"program={path} is {'a folder' if Path(path).is_dir() else 'no regular file'}"])
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError([f"program={path} cannot be read: {why}"]) from error
    return read_program(text)


def refuse_other_values(path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ConfigError if the header `theirs` of a program file and `ours` differ in a value that both have."""
    both = [name for name in theirs if name in ours]
    differing = [f"{name}={theirs[name]} there, {ours[name]} here" for name in both if theirs[name] != ours[name]]
    if differing:
        raise ConfigError([f"program={path} is for other values: {'; '.join(differing)}; give those of its header"])


def program_of(config: RunConfig, gradient_bytes: Sequence[int]) -> Program:
    """Return the program of a run: that of its file, or else that of its schedule.

    A baseline does not execute it, but its memory is compared with what the program would take. `gradient_bytes` is by
    stage.

    Raises:
        ConfigError: the file cannot be read, or is for another run.
        ScheduleError: the program is broken; the message says in which line and why.
    """
    if config.program is None:
        return Program(config.schedule(gradient_bytes))
    program = read_program_file(config.program)
    refuse_other_values(config.program, asdict(program.schedule.spec), asdict(config.spec()))
    return program


def with_absolute_program(config: RunConfig) -> RunConfig:
    """Return the configuration with an absolute path of its program: the run may be resumed from another folder."""
    return config if config.program is None else replace(config, program=str(Path(config.program).absolute()))


def with_header_of_program(overrides: Sequence[str]) -> list[str]:
    """Return the overrides; if `program=` names a file, the settings of its header come before them.

    Raises:
        ConfigError: the file cannot be read, or a given value differs from its header.
        ScheduleError: the program is broken.
    """
    paths = [text.removeprefix(_KEY) for text in overrides if text.startswith(_KEY)]
    if not paths:
        return [*overrides]
    header = {
        name: json.dumps(value) if isinstance(value, (bool, list, tuple)) else str(value)
        for name, value in asdict(read_program_file(typed_path(paths[-1])).schedule.spec).items()
        if value is not None and name != "sources"  # the model gives them
    }
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    plain = {name: text for name, text in given.items() if _PLAIN.fullmatch(text)}  # others have several spellings
    refuse_other_values(paths[-1], header, plain)
    return [
        *(f"{name}={text}" for name, text in header.items()),
        f"program={Path(typed_path(paths[-1])).resolve()}",
        *(text for text in overrides if not text.startswith(_KEY)),
    ]
