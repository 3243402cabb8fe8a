"""Standard streams that are closed, full or not read: what a command prints may be lost, what it does goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from typing import ParamSpec, TextIO

_P = ParamSpec("_P")


def open_standard_streams() -> None:
    """Open standard streams that the shell has closed (`>&-`) on /dev/null.

    Otherwise the next file that is opened would get the file descriptor of a closed stream, and with it its text.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def escape_what_cannot_be_encoded() -> None:
    """Let standard output show characters that its encoding lacks, as in the name of a folder, by escapes."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does


class OutputError(Exception):
    """The output of a command cannot be written."""


def write_out(text: str) -> None:
    """Write to standard output. A reader that stops reading (`| head`) is no error.

    Raises:
        OutputError: the text cannot be written, e.g. to a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def write_error(text: str) -> None:
    """Write to standard error; if that fails, go on."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    from cdp_repro.launch.full_streams import discard  # here: the package takes 0.1 s, and full disks are rare

    discard(stream)


def command(main: Callable[_P, int]) -> Callable[_P, int]:
    """Make a function the main function of a command, with exit code 1 if its output cannot be written.

    The exit code is 2 if the current folder does not exist.
    """

    @wraps(main)
    def run(*arguments: _P.args, **named: _P.kwargs) -> int:
        open_standard_streams()
        escape_what_cannot_be_encoded()
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
