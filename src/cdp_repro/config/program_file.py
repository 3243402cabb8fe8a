"""A program file among the settings: its header gives those that the schedule is built from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cdp_repro.config.errors import ConfigError
from cdp_repro.config.paths import typed_path
from cdp_repro.schedule import Program
from cdp_repro.schedule.program_text import read_program

_KEY = "program="


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


def with_header_of_program(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with those of a program's header before them where `program=` names a file."""
    paths = [text.removeprefix(_KEY) for text in overrides if text.startswith(_KEY)]
    if not paths:
        return [*overrides]
    values = asdict(read_program_file(typed_path(paths[-1])).schedule.spec)
    found = [
        f"{name}={json.dumps(value) if isinstance(value, (bool, list, tuple)) else value}"
        for name, value in values.items()
        if value is not None
    ]
    given = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in overrides}
    differing = [
        f"{name}={value} there, {given[name]} here"
        for name, value in values.items()
        if name in given and isinstance(value, int | str) and given[name] != str(value)
    ]
    if differing:
        raise ConfigError([f"program={paths[-1]} is for other values: {'; '.join(differing)}; leave them out"])
    return [
        *found,
        f"program={Path(typed_path(paths[-1])).resolve()}",
        *(text for text in overrides if not text.startswith(_KEY)),
    ]
