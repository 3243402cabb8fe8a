"""Standard streams that cannot be written, as on a full disk."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Send the rest of a stream to /dev/null, with what its buffer still holds when Python ends."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def discard_what_cannot_be_written() -> None:
    """Flush the standard streams; discard one that fails, since `multiprocessing` fails a process that cannot flush."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)
        except (AttributeError, ValueError):  # none, or closed
            continue
