"""The first pass: forwards and backwards in the timeline's slots, on the placement's ranks, at the rule's versions."""

from __future__ import annotations

from collections import defaultdict
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
    sizes, timeline, period = schedule.sizes, schedule.timeline, schedule.slots_per_step
    slot_of = {Op.FORWARD: timeline.forward}
    if timeline.splits_backward:
        slot_of |= {Op.BACKWARD_INPUT: timeline.backward, Op.BACKWARD_WEIGHTS: timeline.backward_weights}
    else:
        slot_of[Op.BACKWARD] = timeline.backward
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for step, i, stage in product(range(steps), range(sizes.turns), range(sizes.stages)):
        first = (first_step + step) * sizes.micro_batches + i * sizes.replicas
        for op, within in slot_of.items():
            computes = [compute_action(schedule, op, m, stage) for m in range(first, first + sizes.replicas)]
            found[step * period + within(i, stage)] += computes
    forwards_are_last = schedule.spec.slot_order == "backward_first"
    for actions in found.values():
        actions.sort(key=lambda action: ((action.op is Op.FORWARD) is forwards_are_last, action.micro_batch))
    return [found[slot] for slot in range(max([steps * period, *(slot + 1 for slot in found)]))]
