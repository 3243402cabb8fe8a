"""The first pass: forwards and backwards from the timeline, on the placement's ranks, at the rule's versions."""

from __future__ import annotations

from collections.abc import Iterator

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import (
    INPUT,
    LENT_BACKWARD,
    LENT_FORWARD,
    OUTPUT_GRADIENT,
    PREFIX,
    PREFIX_GRADIENT,
    SAVED,
    WEIGHT_WORK,
    Value,
    buffers,
    micro_batch_value,
    parameters,
)

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
    slots: Slots = []
    for slot, action in _timed(schedule, first_step, steps):
        while len(slots) <= slot:
            slots.append([])
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
                    yield forward, _forward(schedule, m, stage)
                    yield backward, _backward(schedule, m, stage)
                    if timeline.splits_backward:
                        yield start + timeline.backward_weights(i, stage), _backward_weights(schedule, m, stage)


def _forward(schedule: Schedule, m: int, stage: int) -> Action:
    rank, version = schedule.placement.rank_of(m, stage), schedule.rule.version(m, stage)
    worker = buffers(stage, schedule.statistics_of(m))
    inputs = [micro_batch_value(INPUT, source + 1, m) for source in schedule.sizes.sources[stage]]
    is_last = stage == schedule.stages - 1
    output = micro_batch_value(OUTPUT_GRADIENT, stage, m) if is_last else micro_batch_value(INPUT, stage + 1, m)
    before, after = schedule.sizes.tokens_before(m), schedule.sizes.tokens_after(m)
    known = () if before is None else (micro_batch_value(PREFIX, stage, before),)
    kept = () if after is None else (micro_batch_value(PREFIX, stage, m),)
    reads = (*inputs, parameters_read(schedule, LENT_FORWARD, m, stage, rank, version), worker, *known)
    writes = (micro_batch_value(SAVED, stage, m), output, worker, *kept)
    return Action(Op.FORWARD, rank, stage, m, version, reads=reads, writes=writes)


def _backward(schedule: Schedule, m: int, stage: int) -> Action:
    rank, version = schedule.placement.rank_of(m, stage), schedule.rule.backward_version(m, stage)
    lent = parameters_read(schedule, LENT_BACKWARD, m, stage, rank, version)
    before, after = schedule.sizes.tokens_before(m), schedule.sizes.tokens_after(m)
    later = () if after is None else (micro_batch_value(PREFIX_GRADIENT, stage, m),)
    of_prefix = () if before is None else (micro_batch_value(PREFIX_GRADIENT, stage, before),)
    of_inputs = [micro_batch_value(OUTPUT_GRADIENT, source, m) for source in schedule.sizes.sources[stage]]
    reads = (micro_batch_value(SAVED, stage, m), micro_batch_value(OUTPUT_GRADIENT, stage, m), lent, *later)
    writes = (*of_inputs, *of_prefix)
    if not schedule.timeline.splits_backward:
        return Action(Op.BACKWARD, rank, stage, m, version, reads=reads, writes=writes)
    writes = (*writes, micro_batch_value(WEIGHT_WORK, stage, m))
    return Action(Op.BACKWARD_INPUT, rank, stage, m, version, reads=reads, writes=writes)


def _backward_weights(schedule: Schedule, m: int, stage: int) -> Action:
    rank, version = schedule.placement.rank_of(m, stage), schedule.rule.backward_version(m, stage)
    reads = (micro_batch_value(WEIGHT_WORK, stage, m),)
    return Action(Op.BACKWARD_WEIGHTS, rank, stage, m, version, reads=reads)


def parameters_read(schedule: Schedule, kind: str, m: int, stage: int, rank: int, version: int) -> Value:
    """Return the parameters that a rank computes with: its own, or a copy that is lent for this one action."""
    if stage in schedule.lent and (schedule.placement.is_sharded or rank not in schedule.placement.holders(stage)):
        return Value(kind, stage, m, version)
    return parameters(stage, version)
