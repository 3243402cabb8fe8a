"""Paths as people type them on a command line: spaces, commas, umlauts and all, ~ for their own folder."""

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
"""Bytes: file systems take no longer name of a file or folder."""
_LONGEST_PATH = 4095
"""Bytes: Linux takes no longer path in one call."""
PATH_KEYS = ("run_dir", "dataset.root", "program", "model.weights")
"""Settings whose values are paths."""


def typed_path(text: str) -> str:
    """Return the path that `text` stands for: `~` written out, and taken out of the quotes that Hydra would need.

    Raises:
        ConfigError: a name in it is longer than file systems take.
    """
    path = text
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]:
        with suppress(HydraException):  # else the quotes belong to the name
            path = str(OverridesParser.create().parse_override(f"path={text}").value())
    if path.startswith("~"):
        with suppress(RuntimeError):  # nobody of that name: a folder that is called so
            path = str(Path(path).expanduser())
    refuse_long_names(path)
    return path


def refuse_long_names(path: str) -> None:
    """Raise ConfigError if a path, or a name in it, is longer than the system takes."""
    names = [(name, "name", LONGEST_NAME) for name in path.split("/")]
    for text, kind, longest in (*names, (path, "path", _LONGEST_PATH)):
        if (length := len(os.fsencode(text))) > longest:
            begin = text[:20]
            raise ConfigError([f"the {kind} {begin}... has {length} bytes: use at most {longest}, such as {begin}"])


def shortened(name: str, longest: int) -> str:
    """Return a name of at most so many bytes: a longer one ends in a digest, which tells it from others."""
    if len(os.fsencode(name)) <= longest:
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).hexdigest()
    return f"{os.fsencode(name)[: longest - 13].decode(errors='ignore')}-{digest}"


def quoted_for_hydra(override: str) -> str:
    """Return an override with its path in quotes, so that Hydra takes it as it stands; others as they are.

    A comma is a part of the path. So a sweep over several is written as Hydra's function: `choice(a,b)`.
    """
    key, _, text = override.partition("=")
    if key not in PATH_KEYS or text in ("", "null") or re.fullmatch(r"choice\(.*\)", text):
        return override
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + (end[2] and "\\'"), typed_path(text))
    return f"{key}='{escaped}'"
