"""Where in the schedule each rank stands, for the one that has to say why it waits in vain."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from cdp_repro.engine.team import Team
from cdp_repro.schedule import Slot


class Positions:
    """Each rank writes down the slot it begins; any rank can read where all are."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._store = team.store if team.size > 1 else None

    def enter(self, slot: Slot) -> None:
        """Write down that this rank begins its part of `slot`."""
        if self._store is not None:
            self._store.set(_key(self._team.rank), str(slot))

    def fail(self, error: Exception) -> None:
        """Write down why this rank does not go on: others wait for it in vain."""
        if self._store is not None:
            with suppress(dist.DistError, RuntimeError):  # the error that ended the run must be the one that is raised
                self._store.set(_failure_key(self._team.rank), f"{type(error).__name__}: {error}")

    def report(self) -> str:
        """Return a line a rank: the slot that it began last, its actions there, and the error that has ended it."""
        if self._store is None:
            return ""
        try:
            return "\n".join(f"  rank {rank} began slot {self._of(rank)}" for rank in range(self._team.size))
        except (dist.DistError, RuntimeError) as error:
            return f"  where the ranks stand cannot be read: {error}"

    def _of(self, rank: int) -> str:
        assert self._store is not None
        slot, failure = self._text(_key(rank)), self._text(_failure_key(rank))
        return (slot or "none yet") + (f"; it ended with {failure}" if failure else "")

    def _text(self, key: str) -> str | None:
        assert self._store is not None
        return self._store.get(key).decode() if self._store.check([key]) else None


def _key(rank: int) -> str:
    return f"position/{rank}"


def _failure_key(rank: int) -> str:
    return f"failure/{rank}"
