"""Roles: which rank does, a training step later, what another does in this one."""

from __future__ import annotations

from collections.abc import Callable

from cdp_repro.schedule.schedule import Schedule


class Roles:
    """The permutation of ranks from one training step to the next.

    Micro-batches that take turns on the n ranks of a group, such as the 3 of `model_parallel` with M = 4, come to
    another rank a step later: what rank r does with micro-batch m, another does with m + M. It is the same for every
    stage and micro-batch, so the whole step is the same but for the names of the ranks, and the period of a program is
    one training step for every placement. A rank that computes nothing keeps its role.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raise ValueError if the placement moves a rank's work to several ranks, which has no such permutation."""
        self._cycle_of = _cycles(schedule)
        self.are_fixed = all(len(cycle) == 1 for cycle, _ in self._cycle_of.values())
        """Whether every rank keeps its role."""

    def after(self, steps: int) -> Callable[[int], int] | None:
        """Return what maps a rank to the one that plays its role `steps` later; None if each keeps its own."""
        if self.are_fixed or not steps:
            return None
        cycle_of = self._cycle_of

        def later(rank: int) -> int:
            cycle, place = cycle_of[rank]
            return cycle[(place + steps) % len(cycle)]

        return later

    def cycle(self, rank: int) -> tuple[int, ...]:
        """Return the roles that a rank plays, one after the other in reverse order."""
        return self._cycle_of[rank][0]


def _cycles(schedule: Schedule) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return by rank the ranks that play its role in turn, and its place among them."""
    placement, step = schedule.placement, schedule.micro_batches
    following: dict[int, int] = {}
    for stage in range(schedule.stages):
        for m in range(2 * step):
            rank, later = placement.rank_of(m, stage), placement.rank_of(m + step, stage)
            if following.setdefault(rank, later) != later:
                raise ValueError(
                    f"{schedule}: a training step later, the work of rank {rank} is on ranks "
                    f"{following[rank]} and {later}; it must move as a whole"
                )
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    for rank in range(schedule.ranks):
        if rank not in found:
            cycle = [rank]
            while (following.get(cycle[-1], rank)) != rank:
                cycle.append(following[cycle[-1]])
            found |= {each: (tuple(cycle), place) for place, each in enumerate(cycle)}
    return found
