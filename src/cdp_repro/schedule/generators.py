"""Timelines: which micro-batch computes which stage in which slot. Compute only; the passes add the rest.

A generator is lazy in time and in data: it asks `steps` for the next training step only when the first forward
of that step is due, so that `range(10)`, `itertools.count()` and a stream of batches of unknown length are all
the same to it, and it holds no more than the micro-batches in flight. When `steps` ends, the pipeline drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from cdp_repro.schedule.actions import Action, Op, Slot

Generator = Callable[[int, int, Iterable[int], int], Iterator[Slot]]


def simultaneous(workers: int, stages: int, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
    """Data parallelism: all workers run stage j forward in slot 2St + j, backward in slot 2St + 2S-1-j.

    N = S = 3, one training step (F0 = forward of stage 0):

        slot      0  1  2  3  4  5
        worker 0  F0 F1 F2 B2 B1 B0
        worker 1  F0 F1 F2 B2 B1 B0
        worker 2  F0 F1 F2 B2 B1 B0
    """
    slots = count(first_slot)
    for step in steps:
        for phase in range(2 * stages):
            members = range(step * workers, (step + 1) * workers)
            yield Slot(next(slots), tuple(_compute(micro_batch, phase, stages) for micro_batch in members))


def cyclic(workers: int, stages: int, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
    """Cyclic data parallelism (the paper's figure 1): micro-batch m starts in slot 2cm, with S = cN stages.

    Its forward of stage j is in slot 2cm + j, its backward in slot 2cm + 2S-1-j; slots count from the first
    micro-batch of `steps`, which starts in `first_slot`. N = S = 3, two training steps:

        slot      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        worker 0  F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 1        F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 2              F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
    """
    delay = 2 * (stages // workers)
    upcoming = (step * workers + worker for step in steps for worker in range(workers))
    in_flight: deque[tuple[int, int]] = deque()
    for slot in count(first_slot):
        if (slot - first_slot) % delay == 0 and (micro_batch := next(upcoming, None)) is not None:
            in_flight.append((micro_batch, slot))
        if not in_flight:
            return
        yield Slot(slot, tuple(_compute(micro_batch, slot - start, stages) for micro_batch, start in in_flight))
        if slot - in_flight[0][1] == 2 * stages - 1:
            in_flight.popleft()


def _compute(micro_batch: int, phase: int, stages: int) -> Action:
    """Return what a micro-batch does `phase` slots after its start: S forwards, then S backwards."""
    if phase < stages:
        return Action(Op.FORWARD, phase, micro_batch)
    return Action(Op.BACKWARD, 2 * stages - 1 - phase, micro_batch)


TIMELINES: dict[str, Generator] = {"simultaneous": simultaneous, "cyclic": cyclic}
