"""Standard streams that are closed, full or nobody's: what a command prints may be lost, what it does goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TextIO

_P = ParamSpec("_P")


def open_standard_streams() -> None:
    """Open on nothing what the shell has closed (`>&-`): else the next file that is opened gets what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


class OutputError(Exception):
    """What a command prints cannot be written."""


def write_out(text: str) -> None:
    """Write to standard output; that nobody reads on (`| head`) is no error.

    Raises:
        OutputError: it cannot be written, e.g. to a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _give_up(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def write_error(text: str) -> None:
    """Write to standard error, if it can be."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Send the rest of a stream, and what it still holds when Python ends, to nothing."""
    with suppress(OSError, ValueError):  # a stream without a number is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(main: Callable[_P, int]) -> Callable[_P, int]:
    """Make a function the main function of a command: its exit code is 1 where its output is lost."""

    @wraps(main)
    def run(*arguments: _P.args, **named: _P.kwargs) -> int:
        open_standard_streams()
        try:
            Path.cwd()
        except OSError:
            write_error("error: the current folder does not exist any more: change to another one\n")
            return 2
        try:
            return main(*arguments, **named)
        except OutputError as error:
            write_error(f"{error}\n")
            return 1

    return run
