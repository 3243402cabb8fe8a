"""The console commands. They import what they need only when they run, so that Ctrl-C meanwhile ends them quietly."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import NoReturn

from cdp_repro.cli.streams import write_error


def train() -> NoReturn:
    """Run `cdp-train`."""
    _run("cdp_repro.cli.train")


def plan() -> NoReturn:
    """Run `cdp-plan`."""
    _run("cdp_repro.cli.plan")


def verify() -> NoReturn:
    """Run `cdp-verify`."""
    _run("cdp_repro.cli.verify")


def export() -> NoReturn:
    """Run `cdp-export`."""
    _run("cdp_repro.cli.export")


def report() -> NoReturn:
    """Run `cdp-report`."""
    _run("cdp_repro.cli.report")


def end_with(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that `main` returns, when threads and exit handlers have ended, but do not take Python apart.

    To free the objects that torch has made, one by one, takes a fifth of the processor time of a short run.
    """
    codes: list[int] = []

    def leave() -> None:
        if codes:  # else `main` has raised, and Python shows what
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # full, or closed
                    stream.flush()
            os._exit(codes[0])

    atexit.register(leave)  # first, so that it is called last
    codes.append(main())
    sys.exit(codes[0])


def _run(module: str) -> NoReturn:
    end_with(partial(_code_of, module))


def _code_of(module: str) -> int:
    try:
        return int(import_module(module).main())
    except KeyboardInterrupt:
        write_error("interrupted\n")
        return 130
