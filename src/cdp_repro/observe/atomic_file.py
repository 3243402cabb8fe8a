"""Files that are there whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` so that a reader, or a kill, sees the old or the new content whole.

    A link stays one: what it points to is replaced. A device or a pipe is written to, as it has no content to keep.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    new = unfinished(target)
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Return what the body writes text to; if the body ends without an error, the text replaces `path` as a whole."""
    text = io.StringIO(newline="")
    yield text
    replace_file(path, text.getvalue().encode())


def unfinished(path: Path) -> Path:
    """Return where the new content of `path` is until it is whole; a kill may leave it there."""
    return path.with_name(f".{path.name}.new")
