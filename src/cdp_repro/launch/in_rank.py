"""The code of a process that `local_ranks` starts: calls the function and writes its outcome to a file."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cdp_repro.launch.failures import failure_of
from cdp_repro.launch.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run_rank(number: int, function: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> None:
    """Run the function; write its value or its failure to a file, by a rename, so that a kill leaves no half a file."""
    os.setpgid(0, 0)  # Ctrl-C reaches the launching process only, which passes it on: twice would end the rank
    die_with_parent()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        value = function(*arguments)
        outcome, suffix = pickle.dumps(value if number == 0 else None), "value"
    except BaseException as error:
        outcome, suffix = pickle.dumps(failure_of(number, error, function)), "failure"
    partial = folder / f"{number}.partial"
    partial.write_bytes(outcome)
    partial.replace(folder / f"{number}.{suffix}")
    sys.exit(suffix == "failure")


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
