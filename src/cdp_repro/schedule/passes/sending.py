"""Messages between neighbouring stages, of buffers, and of lent parameters.

In a slot, a rank first sends values that have been ready since an earlier slot, which overlaps with its compute. It
then computes, sends the values that it has just made, and updates. At last it sends parameters that an update has made
and that another rank needs in the next slot. A message of slot k arrives before slot k+1 needs it.
"""

from __future__ import annotations

from cdp_repro.schedule.actions import Action, Op, send
from cdp_repro.schedule.meaning import collective
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import LENT, Kind, Value, buffers, micro_batch_value


def add_boundary_messages(slots: Slots, schedule: Schedule) -> Slots:
    """Send each stage's output, the gradients of its inputs, and its buffers to the ranks that read them next."""
    return [[each for action in actions for each in (action, *_boundary(action, schedule))] for actions in slots]


def _boundary(action: Action, schedule: Schedule) -> list[Action]:
    stage, m, rank_of, sizes = action.stage, action.micro_batch, schedule.placement.rank_of, schedule.sizes
    wanted: list[tuple[Value, int]] = []
    if action.op is Op.FORWARD:
        if stage < schedule.stages - 1:
            wanted.append((micro_batch_value(Kind.INPUT, stage + 1, m), rank_of(m, sizes.readers[stage])))
        statistics = schedule.statistics_of(m)
        wanted.append((buffers(stage, statistics), rank_of(schedule.next_with(statistics, m + 1), stage)))
    elif action.op.passes_on:
        for source in sizes.sources[stage]:
            wanted.append((micro_batch_value(Kind.OUTPUT_GRADIENT, source, m), rank_of(m, source)))
    return [end for value, rank in wanted if rank != action.rank for end in send(value, action.rank, rank)]


def add_lending(slots: Slots, schedule: Schedule) -> Slots:
    """Bring the parameters of lent stages to the ranks that compute with them, one slot earlier.

    In that slot a message goes before the compute, or after it if the slot itself makes the version. Parameters for the
    first slot of a run are brought in that slot. A collective of all ranks gathers shards; else the one holder sends a
    copy.
    """
    out: Slots = [[] for _ in slots]
    late: Slots = [[] for _ in slots]
    for number, actions in enumerate(slots):
        place = max(0, number - 1)
        made = {(a.stage, a.version) for a in slots[place] if a.op is Op.UPDATE} if number else set()
        for lent, rank in [(value, a.rank) for a in actions for value in a.reads if value.kind in LENT]:
            target = late if (lent.stage, lent.version) in made else out
            target[place] += _brought(lent, rank, schedule)
    return [[*early, *actions, *after] for early, actions, after in zip(out, slots, late, strict=True)]


def _brought(lent: Value, rank: int, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions that bring lent parameters to a rank."""
    if schedule.placement.is_sharded:
        return (collective(schedule, lent, rank),)
    return send(lent, schedule.placement.holders(lent.stage)[0], rank)
