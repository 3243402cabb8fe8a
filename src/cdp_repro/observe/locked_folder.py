"""A folder in which one process at a time does something."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder where there is none, and wait until no other process is in this body for it.

    Raises:
        OSError: the folder cannot be made or read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
