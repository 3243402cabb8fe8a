"""Paths as people type them on a command line: spaces, commas, umlauts and all, ~ for their own folder."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

PATH_KEYS = ("run_dir", "dataset.root", "program", "model.weights")
"""Settings whose values are paths."""


def typed_path(text: str) -> str:
    """Return the path that `text` stands for: `~` written out, and taken out of the quotes that Hydra would need."""
    path = text
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]:
        with suppress(HydraException):  # else the quotes belong to the name
            path = str(OverridesParser.create().parse_override(f"path={text}").value())
    if path.startswith("~"):
        with suppress(RuntimeError):  # nobody of that name: a folder that is called so
            return str(Path(path).expanduser())
    return path


def quoted_for_hydra(override: str) -> str:
    """Return an override with its path in quotes, so that Hydra takes it as it stands; others as they are."""
    key, _, text = override.partition("=")
    if key not in PATH_KEYS or text in ("", "null"):
        return override
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + (end[2] and "\\'"), typed_path(text))
    return f"{key}='{escaped}'"
