"""The log of a run that a sweep trains, with a lock: only one process works on the run at a time.

The training process inherits the lock. So a sweep may be killed and repeated while a run still goes on, and two sweeps
may share their work: each waits for the other.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cdp_repro.launch.signals import StopRequest

logger = logging.getLogger("cdp_repro")


def log_path(directory: Path) -> Path:
    """Return the file for the output of the processes of a run, given its directory."""
    return directory.with_name(f"{directory.name}.log")


@contextmanager
def locked_log(path: Path, stop: StopRequest) -> Iterator[IO[bytes]]:
    """Open a run's log once no other process works on the run, or once a stop is requested.

    The lock belongs to the open file, so a process that is given the file holds it, too. For the same reason only
    closing the file may release it: an explicit unlock here would also unlock it for a process that still trains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        told = False
        while stop.signal is None:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    logger.info("another process trains in %s: waiting for it", path.with_suffix(""))
                told = True
                time.sleep(0.2)
        yield log
