"""The first pass: forwards and backwards in the timeline's slots, on the placement's ranks, at the rule's versions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.meaning import compute_action
from cdp_repro.schedule.schedule import Schedule

Slots = list[list[Action]]
"""The actions of each slot of a run, in an order in which one process could run them all."""


def compute(schedule: Schedule, first_step: int, steps: int) -> Slots:
    """Return the forwards and backwards of a run of `steps` training steps, without the gradients of parameters.

    The paper's accounting has forwards first in a slot: all activations of a slot are alive together. Backwards first
    free memory before the forwards take it. This lowers the peak of equal stages from (N+1)/2 to N/2 times the
    activations of one micro-batch (for odd N: N/2 plus half a stage). Within each kind, actions are in the order of the
    micro-batches, in which gradients are added.
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
    micro_batches, period, slot_of = sizes.micro_batches, timeline.period, {Op.FORWARD: timeline.forward}
    if timeline.splits_backward:
        slot_of |= {Op.BACKWARD_INPUT: timeline.backward, Op.BACKWARD_WEIGHTS: timeline.backward_weights}
    else:
        slot_of[Op.BACKWARD] = timeline.backward
    for step, i, stage in product(range(steps), range(sizes.turns), range(sizes.stages)):
        first = (first_step + step) * micro_batches + i * replicas
        for op, within in slot_of.items():
            slot = step * period + within(i, stage)
            for m in range(first, first + replicas):
                yield slot, compute_action(schedule, op, m, stage)
