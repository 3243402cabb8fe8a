"""The code of a rank that `local_ranks` has started: calls the function and writes its outcome to a file."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from cdp_repro.launch.failures import failure_of
from cdp_repro.launch.full_streams import discard_what_cannot_be_written
from cdp_repro.launch.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # of linux/prctl.h

_IMPORTED = os.getpid(), os.getppid()
"""The process that imported this module, and its parent: noted before the import of torch, which takes seconds."""


def run_rank(number: int, function: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> None:
    """Run the function; write its value or its failure to a file, by a rename, so that a kill leaves no partial one."""
    os.setpgid(0, 0)  # Ctrl-C reaches only the launching process, which passes it on: a second one would end the rank
    end_with_starter()
    _name(f"cdp-rank-{number}")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        value = function(*arguments)
        outcome, path = pickle.dumps(value if number == 0 else None), value_path(folder, number)
    except BaseException as error:
        outcome, path = pickle.dumps(failure_of(number, error, function)), failure_path(folder, number)
    partial = folder / f"{number}.partial"
    partial.write_bytes(outcome)
    partial.replace(path)
    discard_what_cannot_be_written()
    sys.exit(path == failure_path(folder, number))


def value_path(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes what its function has returned, pickled."""
    return folder / f"{rank}.value"


def failure_path(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes how its function has failed, pickled."""
    return folder / f"{rank}.failure"


def _name(text: str) -> None:
    """Have `top`, `ps -o comm` and debuggers show this process, and threads that it starts, under a name."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, text.encode())


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def first_parent() -> int:
    """Return the parent of this process when it imported this module; its current parent if it was forked since."""
    process, parent = _IMPORTED
    return parent if process == os.getpid() else os.getppid()


def end_with(parent: int) -> None:
    """Die with the parent, or at once if process `parent` ended while this one was still importing."""
    die_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_starter() -> None:
    """Die with the process that has started this one through `multiprocessing`."""
    starter = parent_process()
    assert starter is not None and starter.pid is not None, "multiprocessing has started this process"
    end_with(starter.pid)
