"""Paths as people type them on a command line: with spaces, commas and umlauts, and ~ for the home folder."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cdp_repro.config.errors import ConfigError

LONGEST_NAME = 255
"""Bytes; the longest name of a file or folder that file systems accept."""
_LONGEST_PATH = 4095
"""Bytes; the longest path that Linux accepts in a call."""
PATH_KEYS = ("run_dir", "dataset.root", "program", "model.weights")
"""Settings whose values are paths."""
_NONE = ("", "null")
"""How people type that a setting has no path."""


def typed_path(text: str) -> str:
    """Return the path that `text` stands for: with `~` expanded, and without quotes that were typed for Hydra.

    Raises:
        ConfigError: the path, or a name in it, is longer than the system accepts.
    """
    path = text
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]:
        with suppress(HydraException):  # no quoted string: the quotes belong to the name
            path = str(OverridesParser.create().parse_override(f"path={text}").value())
    if path.startswith("~"):
        with suppress(RuntimeError):  # no user of that name: the name of the folder begins with ~
            path = str(Path(path).expanduser())
    refuse_long_names(path)
    return path


def typed_path_or_none(text: str) -> str | None:
    """Return the path that the value of a setting stands for; None if it says that there is none.

    Raises:
        ConfigError: see `typed_path`.
    """
    return None if text in _NONE else typed_path(text)


def refuse_long_names(path: str) -> None:
    """Raise ConfigError if a path, or a name in it, is longer than the system accepts."""
    names = [(name, "name", LONGEST_NAME) for name in path.split("/")]
    for text, kind, longest in (*names, (path, "path", _LONGEST_PATH)):
        if (length := len(os.fsencode(text))) > longest:
            begin = text[:20]
            raise ConfigError([f"the {kind} {begin}... has {length} bytes: use at most {longest}, such as {begin}"])


def shortened(name: str, longest: int) -> str:
    """Return a name of at most `longest` bytes: a longer one is cut, and a digest at its end keeps it unique."""
    if len(os.fsencode(name)) <= longest:
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).hexdigest()
    return f"{os.fsencode(name)[: longest - 13].decode(errors='ignore')}-{digest}"


def quoted_for_hydra(override: str) -> str:
    """Return an override with its path in quotes, so that Hydra takes the path literally; others are unchanged.

    A comma is part of the path. So a sweep over several paths is written with Hydra's function `choice(a,b)`.
    """
    key, _, text = override.partition("=")
    if key not in PATH_KEYS or text in _NONE or re.fullmatch(r"choice\(.*\)", text):
        return override
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + (end[2] and "\\'"), typed_path(text))
    return f"{key}='{escaped}'"
