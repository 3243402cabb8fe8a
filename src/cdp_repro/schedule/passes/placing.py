"""The first pass: forwards and backwards from the timeline, on the placement's ranks, at the rule's versions."""

from __future__ import annotations

from collections.abc import Iterator

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.meaning import compute_values, lent_for, version_read
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import parameters

Slots = list[list[Action]]
"""The actions of each slot, from the first of a run, in an order in which one process could run them all."""


def compute(schedule: Schedule, first_step: int, steps: int) -> Slots:
    """Return the forwards and backwards of a run of `steps` training steps, without the gradients of parameters.

    Within a slot, forwards first is the paper's accounting: all activations of a slot are alive together. Backwards
    first frees memory before the forwards take it, which lowers the peak of equal stages from (N+1)/2 to N/2 times the
    activations of one micro-batch (for odd N: N/2 plus half a stage). Within each kind the order is that of the
    micro-batches, which is the order in which gradients are added.
    """
    forwards_are_last = schedule.spec.slot_order == "backward_first"
    timed = [*_timed(schedule, first_step, steps)]
    slots: Slots = [[] for _ in range(max([steps * schedule.slots_per_step, *(slot + 1 for slot, _ in timed)]))]
    for slot, action in timed:
        slots[slot].append(action)
    for actions in slots:
        actions.sort(key=lambda action: ((action.op is Op.FORWARD) is forwards_are_last, action.micro_batch))
    return slots


def _timed(schedule: Schedule, first_step: int, steps: int) -> Iterator[tuple[int, Action]]:
    """Yield each forward and backward with its slot, counted from the start of the run."""
    sizes, timeline, replicas = schedule.sizes, schedule.timeline, schedule.sizes.replicas
    for step in range(steps):
        start, before = step * timeline.period, (first_step + step) * sizes.micro_batches
        for i in range(sizes.turns):
            for stage in range(sizes.stages):
                forward, backward = start + timeline.forward(i, stage), start + timeline.backward(i, stage)
                for m in range(before + i * replicas, before + (i + 1) * replicas):
                    yield forward, _compute(schedule, Op.FORWARD, m, stage)
                    if timeline.splits_backward:
                        yield backward, _compute(schedule, Op.BACKWARD_INPUT, m, stage)
                        weights = start + timeline.backward_weights(i, stage)
                        yield weights, _compute(schedule, Op.BACKWARD_WEIGHTS, m, stage)
                    else:
                        yield backward, _compute(schedule, Op.BACKWARD, m, stage)


def _compute(schedule: Schedule, op: Op, m: int, stage: int) -> Action:
    rank, version = schedule.placement.rank_of(m, stage), version_read(schedule, op, m, stage)
    is_own = rank in schedule.placement.holders(stage) and not schedule.placement.is_sharded
    read = parameters(stage, version) if is_own else lent_for(op, m, stage, version)
    reads, writes = compute_values(schedule, op, m, stage, read)
    return Action(op, rank, stage, m, version, reads=reads, writes=writes)
