"""The temporary folder of a launching process; that of a killed process is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "cdp-repro-"
_LOCK = ".lock"
_YOUNG_SECONDS = 60.0
"""The process of a younger folder may not have locked it yet."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the body, and remove those that killed processes of this user have left."""
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or just removed by another process
            _remove_if_left(path)
    with TemporaryDirectory(prefix=_PREFIX) as name, Path(name, _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_if_left(path: Path) -> None:
    """Remove a folder that no process locks any more; one without a lock was made by something else."""
    found = path.lstat()  # of a link itself, which another user may have put there
    if found.st_uid != os.getuid() or found.st_mtime > time.time() - _YOUNG_SECONDS:
        return
    with (path / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
