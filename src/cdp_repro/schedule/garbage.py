"""Much is made and none of it is garbage: Python need not search it for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from searching for cycles: half of the time of a long program, a fifth of that of importing torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else a user has frozen objects, which would be thawed
                gc.freeze()
                gc.unfreeze()  # the new objects count as old now: the next search leaves them out
            gc.enable()
