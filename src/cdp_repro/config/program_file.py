"""A program file among the settings: its header gives those that the schedule is built from."""

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
"""A value as there is only one way to type it."""


def read_program_file(path: str) -> Program:
    """Return the checked program of a file.

    Raises:
        ConfigError: the file cannot be read.
        ScheduleError: it is broken; says in which line and why.
    """
    if Path(path).exists() and not Path(path).is_file():  # every rank reads it, and a pipe can be read once
        raise ConfigError([f"program={path} is {'a folder' if Path(path).is_dir() else 'no regular file'}"])
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"program={path} cannot be read: {error}"]) from error
    return read_program(text)


def refuse_other_values(path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ConfigError if the header of a program file says other values than `ours`, of those that both have."""
    both = [name for name in theirs if name in ours]
    differing = [f"{name}={theirs[name]} there, {ours[name]} here" for name in both if theirs[name] != ours[name]]
    if differing:
        raise ConfigError([f"program={path} is for other values: {'; '.join(differing)}; give those of its header"])


def with_absolute_program(config: RunConfig) -> RunConfig:
    """Return a run's configuration with the path of its program absolute: it may go on from another folder."""
    return config if config.program is None else replace(config, program=str(Path(config.program).absolute()))


def with_header_of_program(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with those of a program's header before them where `program=` names a file."""
    paths = [text.removeprefix(_KEY) for text in overrides if text.startswith(_KEY)]
    if not paths:
        return [*overrides]
    header = {
        name: json.dumps(value) if isinstance(value, (bool, list, tuple)) else str(value)
        for name, value in asdict(read_program_file(typed_path(paths[-1])).schedule.spec).items()
        if value is not None and name != "sources"  # which the model has, not the user
    }
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    plain = {name: text for name, text in given.items() if _PLAIN.fullmatch(text)}  # others may be spelled in many ways
    refuse_other_values(paths[-1], header, plain)
    return [
        *(f"{name}={text}" for name, text in header.items()),
        f"program={Path(typed_path(paths[-1])).resolve()}",
        *(text for text in overrides if not text.startswith(_KEY)),
    ]
