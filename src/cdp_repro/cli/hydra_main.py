"""Hydra's answers about a configuration: the composed YAML, where it comes from, completions for a shell."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import hydra

from cdp_repro.cli.streams import write_out
from cdp_repro.config.source import TREE


def ask_hydra(command: str, arguments: Sequence[str]) -> int:
    """Let Hydra answer a command line that asks it to show something; return its exit code.

    Hydra's public interface for this is `hydra.main`, which reads the arguments of the process, so these are replaced.
    It prints, so its answer is caught: `write_out` flushes, and takes a reader that stops reading for no error. Hydra
    ends with 1 for the user's mistakes; here they have 2.

    Raises:
        OutputError: the answer cannot be written.
    """
    answer, code = io.StringIO(), 0
    with _arguments_of_process([command, *arguments]), redirect_stdout(answer):
        try:
            hydra.main(config_path=f"pkg://{TREE}", config_name="config", version_base="1.3")(_runs_nothing)()
        except SystemExit as end:
            code = 2 if end.code else 0
    write_out(answer.getvalue())
    return code


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
