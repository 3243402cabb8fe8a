"""The console commands. They import what they need only when they run, so that Ctrl-C ends them quietly meanwhile."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType
from typing import NoReturn

from cdp_repro.cli.streams import write_error

_INTERRUPTED = "interrupted\n"


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
    """Exit with the code that `main` returns, once threads and exit handlers have ended.

    Python is not taken apart, unless another program has called this one: to free the objects that torch has made, one
    by one, takes a fifth of the processor time of a short run.
    """
    code = main()
    if _is_whole_program():
        threading._shutdown()  # type: ignore[attr-defined]  # as Python: only it ends the threads of executors
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # full, or closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _is_whole_program() -> bool:
    """Whether Python itself has called this, for a script or `-m`: no profiler, debugger, test or other program."""
    frame: FrameType | None = sys._getframe()
    callers = set()
    while frame is not None:
        callers.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return callers <= {"__main__", "runpy", __name__}


def _run(module: str) -> NoReturn:
    end_with(partial(_code_of, module))


def _code_of(module: str) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return int(import_module(module).main())
    except KeyboardInterrupt:
        write_error(_INTERRUPTED)
        return 130


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; in the middle of an import, end at once.

    Code in C that imports a module, as torch's imports numpy, may take the exception for a module that is missing, and
    go on with half of it.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            write_error(_INTERRUPTED)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
