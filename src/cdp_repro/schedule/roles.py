"""Roles: how the work of a rank moves to another rank from one training step to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from cdp_repro.schedule.schedule import Schedule


class Roles:
    """The permutation of ranks from one training step to the next.

    Micro-batches that take turns on the n ranks of a group, such as the 3 of `model_parallel` with M = 4, come to
    another rank a step later: the work of rank r on micro-batch m is that of another rank on m + M. The other rank is
    the same for every stage and micro-batch. So steps differ only in the names of the ranks, and the period of a
    program is one training step for every placement. A rank that computes nothing keeps its role.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raise ValueError if the placement splits a rank's work among several ranks: there is no such permutation."""
        placement, step = schedule.placement, schedule.micro_batches
        self._following: dict[int, int] = {}
        for stage in range(schedule.stages):
            for m in range(2 * step):
                rank, later = placement.rank_of(m, stage), placement.rank_of(m + step, stage)
                if self._following.setdefault(rank, later) != later:
                    raise ValueError(
                        f"{schedule}: a training step later, the work of rank {rank} is on ranks "
                        f"{self._following[rank]} and {later}; it must move as a whole"
                    )
        self.are_fixed = all(rank == later for rank, later in self._following.items())
        """Whether every rank keeps its role."""
        self.cycle = cache(self._cycle)

    def after(self, steps: int) -> Callable[[int], int] | None:
        """Return the map from a rank to the one that plays its role `steps` later; None if each keeps its own."""
        if self.are_fixed:
            return None
        return lambda rank: self.cycle(rank)[steps % len(self.cycle(rank))]

    def _cycle(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that play the role of `rank` one after the other, itself first."""
        found = [rank]
        while (later := self._following.get(found[-1], rank)) != rank:
            found.append(later)
        return tuple(found)
