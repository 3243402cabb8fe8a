"""Where in the schedule each rank stands, for the one that has to say why it waits in vain."""

from __future__ import annotations

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

    def report(self) -> str:
        """Return a line a rank: the slot that it began last, and its actions there."""
        if self._store is None:
            return ""
        try:
            return "\n".join(f"  rank {rank} began slot {self._of(rank)}" for rank in range(self._team.size))
        except (dist.DistError, RuntimeError) as error:
            return f"  where the ranks stand cannot be read: {error}"

    def _of(self, rank: int) -> str:
        assert self._store is not None
        known = self._store.check([_key(rank)])
        return self._store.get(_key(rank)).decode() if known else "none yet"


def _key(rank: int) -> str:
    return f"position/{rank}"
