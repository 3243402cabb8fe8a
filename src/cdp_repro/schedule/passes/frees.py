"""The last read of each value on its rank."""

from __future__ import annotations

from collections import defaultdict

from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.values import Value


def add_frees(slots: Slots, held: dict[int, list[Value]]) -> Slots:
    """Mark the last read of each value on each rank; `held` has the values that must be left at the end.

    The run is followed backwards: a read is the last one if no action seen so far needs the value. A write makes a new
    value, so an earlier value of the same name is another one.
    """
    needed = defaultdict(set, {rank: set(values) for rank, values in held.items()})
    found: Slots = []
    for actions in reversed(slots):
        marked = []
        for action in reversed(actions):
            own, reads = needed[action.rank], action.reads
            if action.writes:
                own.difference_update(action.writes)
            last = tuple([value for value in reads if value not in own]) if reads else ()
            own.update(last)
            marked.append(action.freeing(last) if last else action)
        found.append(marked[::-1])
    return found[::-1]
