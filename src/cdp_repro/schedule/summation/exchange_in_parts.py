"""Two ranks exchange gradients of very uneven stages: large gradients leave in parts.

A link carries messages in the order in which they are sent. Gradients of the last stages, often the largest, are made
first, but the small ones after them are needed first: a forward would wait for all. So in each slot a rank sends about
as many bytes as a mean stage has, the most urgent first. Jayarajan et al. (2019, MLSys) do so with the gradients of
data parallelism.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cdp_repro.schedule.actions import Action, Op, send
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.exchange import only_exchanges, sum_by_exchange
from cdp_repro.schedule.values import Value, gradient_sum

MIN_PART_BYTES = 2**20
"""Starting to send a smaller part would take longer than sending it."""

_LARGE = 1.25
"""A stage with more than this many times the bytes of the mean stage is sent in parts of half the mean."""


def parts_of(gradient_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of parts in which the gradients of each stage are sent.

    For example, with stages of 1, 1 and 10 MiB the mean is 4 MiB, so the last leaves in 5 parts of 2 MiB.
    """
    mean = sum(gradient_bytes) / len(gradient_bytes)
    return tuple(
        max(1, min(math.ceil(2 * size / mean), size // MIN_PART_BYTES)) if size > _LARGE * mean else 1
        for size in gradient_bytes
    )


def leaves_in_parts(schedule: Schedule) -> bool:
    """Whether parts make a difference: two ranks do nothing but exchange, and something overtakes a part."""
    sizes = schedule.gradient_bytes
    if not sizes or not only_exchanges(schedule) or max(parts_of(sizes)) == 1:
        return False
    orders = ([departure.stage for departure in departures(schedule, worker)] for worker in range(2))
    return any(order != sorted(order, reverse=True) for order in orders)


class Departure(NamedTuple):
    """The slot in which a part of a stage's gradients leaves, counted from the first forward of its micro-batch."""

    slot: int
    stage: int
    part: int


def departures(schedule: Schedule, worker: int) -> list[Departure]:
    """Return the order in which one of two workers sends the gradients of a training step.

    In each slot it sends what the other needs first, up to the bytes of a mean stage, but at least one part, and all
    parts that are needed in the next slot.
    """
    sizes = schedule.gradient_bytes
    parts, budget, needed = parts_of(sizes), sum(sizes) / schedule.stages, _needed(schedule, worker)
    turn, begin = worker // schedule.sizes.replicas, _start(schedule, worker)
    made = [schedule.timeline.backward_weights(turn, stage) - begin for stage in range(schedule.stages)]
    waiting: list[tuple[int, int, int]] = []
    found: list[Departure] = []
    slot = min(made)
    while slot <= max(made) or waiting:
        ready = [stage for stage, its_slot in enumerate(made) if its_slot == slot]
        waiting = sorted(waiting + [(needed[j], j, part) for j in ready for part in range(1, parts[j] + 1)])
        sent = 0
        while waiting:
            due, stage, part = waiting[0]
            size = len(part_of(sizes[stage], part, parts[stage]))
            if sent and sent + size > budget and due > slot + 1:
                break
            sent += size
            found.append(Departure(slot, *waiting.pop(0)[1:]))
        slot += 1
    return found


def _needed(schedule: Schedule, worker: int) -> list[int]:
    """Return, by stage, the slot in which the other rank needs a worker's gradients, after its first forward.

    The other rank needs them before it reads the version made from them, or computes its own next gradients.
    """
    timeline, turn = schedule.timeline, (1 - worker) // schedule.sizes.replicas
    begins = schedule.slots_per_step - _start(schedule, worker)
    return [
        begins + (timeline.backward_weights if staleness else timeline.forward)(turn, stage)
        for stage, staleness in enumerate(schedule.rule.matrix[turn])
    ]


def _start(schedule: Schedule, worker: int) -> int:
    """Return the slot of a worker's first forward in a training step."""
    return schedule.timeline.forward(worker // schedule.sizes.replicas, 0)


_Ends = deque[tuple[int, int, Action]]
"""Planned ends of messages, in order, each with its slot and the micro-batch of its gradients."""


def sum_by_exchange_in_parts(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Exchange as `sum_by_exchange` does, but send parts in the order of their `departures`.

    Before an ADD, all parts that it adds have left, and so have all earlier gradients of its stage. Within a slot, a
    rank first computes, then sends what it has just made, and only then waits for what it adds.
    """
    parts, plans = parts_of(schedule.gradient_bytes), [departures(schedule, worker) for worker in range(2)]
    sends: list[_Ends] = [deque(), deque()]  # by the rank that sends
    receives: list[_Ends] = [deque(), deque()]  # likewise; they are on the other rank
    found: Slots = []
    for number, actions in enumerate(sum_by_exchange(slots, schedule, stages)):
        for action in actions:
            if action.op is Op.FORWARD and action.stage == 0:
                m, rank = action.micro_batch, action.rank
                for slot, stage, part in plans[m % 2]:
                    whole, leaves = gradient_sum(stage, (m,)), number + slot
                    ends = send(whole.divided(part, parts[stage]), rank, 1 - rank)
                    sends[rank].append((leaves, m, ends[0]))
                    # posted earlier by the distance of the workers: the receiver may be that far behind the sender
                    receives[rank].append((leaves - _start(schedule, m % 2), m, ends[1]))
        computing = {action.rank for action in actions if action.op.is_compute}
        paced = [end for ends in receives for end in _until(number, ends)]
        paced += [end for rank in sorted({0, 1} - computing) for end in _until(number, sends[rank])]
        for action in actions:
            if action.op is Op.ADD:
                every = (sends[0], receives[0], sends[1], receives[1])
                paced += [end for ends in every for end in _rest_of(action, ends)]
                paced.append(_add_of_parts(action, schedule, parts[action.stage]))
            elif not action.op.is_message:
                paced.append(action)
            if action.op.is_compute:
                paced += _until(number, sends[action.rank])
        found.append(paced)
    return found


def _add_of_parts(action: Action, schedule: Schedule, parts: int) -> Action:
    """Return an ADD that reads all parts of the gradients that the other rank sends."""
    reads: list[Value] = []
    for value in action.reads:
        is_received = schedule.placement.rank_of(value.number, value.stage) != action.rank
        reads += [value.divided(part, parts) for part in range(1, parts + 1)] if is_received else [value]
    return action._replace(reads=tuple(reads))


def _until(slot: int, ends: _Ends) -> list[Action]:
    """Take out the ends that are due up to `slot`."""
    found = []
    while ends and ends[0][0] <= slot:
        found.append(ends.popleft()[-1])
    return found


def _rest_of(add: Action, ends: _Ends) -> list[Action]:
    """Take out all ends up to the last one with gradients of the stage of `add` from its step or an earlier one."""
    (total,) = add.writes
    wanted = [n for n, (_, m, end) in enumerate(ends, start=1) if end.stage == add.stage and m < total.stop]
    return [ends.popleft()[-1] for _ in range(max(wanted, default=0))]
