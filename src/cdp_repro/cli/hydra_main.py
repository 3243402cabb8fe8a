"""Hydra's answers about a configuration: the composed YAML, where it comes from, completions for a shell."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra

from cdp_repro.config.source import TREE


def ask_hydra(command: str, arguments: Sequence[str]) -> int:
    """Let Hydra answer a command line that asks it to show something; return its exit code.

    Hydra's public interface for this is `hydra.main`, which reads the arguments of the process, so these are replaced.
    """
    with _arguments_of_process([command, *arguments]):
        try:
            hydra.main(config_path=f"pkg://{TREE}", config_name="config", version_base="1.3")(_runs_nothing)()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def _runs_nothing(_config: Any) -> None:
    raise AssertionError("Hydra was asked to show something, and would run a job")


@contextmanager
def _arguments_of_process(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [*arguments]
    try:
        yield
    finally:
        sys.argv = before
