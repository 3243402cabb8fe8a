"""The last read of each value on its rank, and the values that a rank holds when the pipeline is drained."""

from __future__ import annotations

from collections import defaultdict

from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import Value, buffers, parameters


def held_after(schedule: Schedule, step: int) -> dict[int, list[Value]]:
    """Return the values that each rank holds when the pipeline has drained after `step` training steps.

    For each stage that it holds, a rank has the newest version and each older one that a later micro-batch reads there.
    Each set of buffers is on the rank that computes with it next. The versions on ranks that take turns may have gaps:
    if micro-batches 0 and 2 of a step read fresh and 1 two steps late, the stale reads move from rank to rank.
    """
    placement, sizes = schedule.placement, schedule.sizes
    first = step * sizes.micro_batches
    held: dict[int, list[Value]] = defaultdict(list)
    for stage in range(sizes.stages):
        holders = placement.holders(stage)
        newest = step * sizes.updates
        versions = {rank: {newest} for rank in holders}
        for m in range(first, first + (schedule.rule.longest + 1) * sizes.micro_batches):
            versions[schedule.holder_read(m, stage)].add(min(newest, schedule.rule.version(m, stage)))
        for rank in holders:
            held[rank] += [schedule.own(parameters(stage, v), rank) for v in sorted(versions[rank])]
        for number in range(sizes.statistics):
            held[placement.rank_of(schedule.next_with(number, first), stage)].append(buffers(stage, number))
    return held


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
