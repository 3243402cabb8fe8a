"""Pacing: where two ranks exchange the gradients of very uneven stages, the large ones leave in parts.

A link takes messages in the order in which they are sent. Gradients of the last stages, which often are the largest,
come first, and the small ones behind them are needed first: a forward would wait for all. So a rank sends in a slot
about as many bytes as a mean stage has, what is needed first before what can wait, as Jayarajan et al. (2019, MLSys)
do with the gradients of data parallelism.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cdp_repro.schedule.actions import Action, Op, Payload, Slot, send
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.placement import Placement
from cdp_repro.schedule.rules import Mode

MIN_PART_BYTES = 2**20
"""A smaller part would take longer to begin than to send."""

_LARGE = 1.25
"""A stage that has more than so many times the bytes of the mean stage is sent in parts, of half the mean each."""


def parts_of(gradient_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return in how many parts the gradients of each stage are sent."""
    mean = sum(gradient_bytes) / len(gradient_bytes)
    return tuple(
        max(1, min(math.ceil(2 * size / mean), size // MIN_PART_BYTES)) if size > _LARGE * mean else 1
        for size in gradient_bytes
    )


def is_paced(placement: Placement, gradient_bytes: Sequence[int]) -> bool:
    """Whether parts make a difference: two ranks do nothing but exchange, and something overtakes a part."""
    if not placement.only_exchanges or max(parts_of(gradient_bytes)) == 1:
        return False
    orders = ([departure.stage for departure in pace(placement.mode, worker, gradient_bytes)] for worker in range(2))
    return any(order != sorted(order, reverse=True) for order in orders)


def pace_exchanges(slots: Iterable[Slot], placement: Placement, gradient_bytes: Sequence[int]) -> Iterator[Slot]:
    """Send exchanged gradients in parts and in the order in which they are needed, as `pace` has planned it.

    All that a rank adds, and all that was made of the sum to which it adds, has left before. In a slot a rank sends
    what it has just made when it has computed, and waits for what it adds after that.
    """
    parts = parts_of(gradient_bytes)
    lanes = {placement.rank_of(m, 0): _Lane(placement, m, gradient_bytes) for m in range(placement.ranks)}
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.FORWARD and action.stage == 0:
                assert action.micro_batch is not None
                lanes[action.rank].begin(action.micro_batch, slot.number)
        computing = {action.rank for action in slot.actions if action.op.is_compute}
        actions = [end for lane in lanes.values() for end in lane.receives(slot.number)]
        actions += [end for rank in sorted(lanes.keys() - computing) for end in lanes[rank].sends(slot.number)]
        for action in slot.actions:
            if action.op is Op.ADD:
                actions += [end for lane in lanes.values() for end in lane.rest_of(action)]
                actions.append(replace(action, parts=parts[action.stage]))
            elif not action.op.is_message:
                actions.append(action)
            if action.op.is_compute:
                actions += lanes[action.rank].sends(slot.number)
        yield Slot(slot.number, tuple(actions))


@dataclass(frozen=True)
class Departure:
    """When a part of a stage's gradients leaves: slots after the first forward of its micro-batch."""

    slot: int
    stage: int
    part: int


def pace(mode: Mode, worker: int, gradient_bytes: Sequence[int]) -> list[Departure]:
    """Return the order in which one of two workers sends the gradients of a training step.

    In each slot it sends what the other needs first, up to the bytes of a mean stage, but one part at least, and all
    that is needed in the next slot.
    """
    stages, parts = mode.stages, parts_of(gradient_bytes)
    budget = sum(gradient_bytes) / stages
    needed = _needed(mode, worker)
    waiting: list[tuple[int, int, int]] = []
    found: list[Departure] = []
    slot = stages
    while slot < 2 * stages or waiting:
        if slot < 2 * stages:
            stage = 2 * stages - 1 - slot
            waiting = sorted([*waiting, *((needed[stage], stage, part) for part in range(1, parts[stage] + 1))])
        sent = 0
        while waiting:
            due, stage, part = waiting[0]
            size = len(part_of(gradient_bytes[stage], part, parts[stage]))
            if sent and sent + size > budget and due > slot + 1:
                break
            sent += size
            found.append(Departure(slot, *waiting.pop(0)[1:]))
        slot += 1
    return found


def _needed(mode: Mode, worker: int) -> list[int]:
    """Return, by stage, the slot in which the other rank needs a worker's gradients, after the worker's first forward.

    It needs them before it reads the version that is made from them, or computes the next of its own.
    """
    other = 1 - worker
    begins = 2 * mode.stages + _delay(mode, other) - _delay(mode, worker)
    stages = range(mode.stages)
    return [begins + (2 * mode.stages - 1 - j if mode.staleness[other][j] else j) for j in stages]


def _delay(mode: Mode, micro_batch: int) -> int:
    """Return how many slots after the first of a training step a micro-batch of it begins."""
    worker = micro_batch // mode.replicas
    return worker * mode.slots_per_step // mode.workers if mode.timeline == "cyclic" else 0


class _Lane:
    """What one rank sends to the other, in order, and what of it has not left, or was not announced there."""

    def __init__(self, placement: Placement, worker: int, gradient_bytes: Sequence[int]) -> None:
        self._rank, self._peer = placement.rank_of(worker, 0), placement.rank_of(1 - worker, 0)
        self._plan = pace(placement.mode, worker, gradient_bytes)
        self._parts = parts_of(gradient_bytes)
        self._ahead = _delay(placement.mode, worker)  # ranks may drift so far that the other is that much behind
        self._micro_batches = placement.mode.micro_batches
        self._sends: deque[tuple[int, Action]] = deque()
        self._receives: deque[tuple[int, Action]] = deque()

    def begin(self, micro_batch: int, slot: int) -> None:
        """Plan the messages of a micro-batch whose first forward is in `slot`."""
        for departure in self._plan:
            stage, parts = departure.stage, self._parts[departure.stage]
            part = departure.part if parts > 1 else None
            ends = send(Payload.GRADIENTS, stage, self._rank, self._peer, micro_batch=micro_batch)
            leaves = slot + departure.slot
            for queue, end, at in zip((self._sends, self._receives), ends, (leaves, leaves - self._ahead), strict=True):
                queue.append((at, replace(end, part=part, parts=parts)))

    def sends(self, slot: int) -> list[Action]:
        """Take out what leaves up to `slot`."""
        return _until(self._sends, slot)

    def receives(self, slot: int) -> list[Action]:
        """Take out what the other rank gets ready for up to `slot`."""
        return _until(self._receives, slot)

    def rest_of(self, add: Action) -> list[Action]:
        """Take out all ends of messages up to the last with gradients of the stage and the training step of `add`."""
        found: list[Action] = []
        for queue in (self._sends, self._receives):
            wanted = [
                number
                for number, (_, end) in enumerate(queue)
                if end.stage == add.stage and self._step_of(end) <= self._step_of(add)
            ]
            found += [queue.popleft()[1] for _ in range(wanted[-1] + 1 if wanted else 0)]
        return found

    def _step_of(self, action: Action) -> int:
        assert action.micro_batch is not None
        return action.micro_batch // self._micro_batches


def _until(queue: deque[tuple[int, Action]], slot: int) -> list[Action]:
    found = []
    while queue and queue[0][0] <= slot:
        found.append(queue.popleft()[1])
    return found
