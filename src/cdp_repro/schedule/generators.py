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

Generator = Callable[[int, int, Iterable[int], int, int], Iterator[Slot]]


def simultaneous(
    workers: int, stages: int, steps: Iterable[int], first_slot: int = 0, replicas: int = 1
) -> Iterator[Slot]:
    """Data parallelism: all workers run stage j forward in slot 2St + j, backward in slot 2St + 2S-1-j.

    N = S = 3, one training step (F0 = forward of stage 0):

        slot      0  1  2  3  4  5
        worker 0  F0 F1 F2 B2 B1 B0
        worker 1  F0 F1 F2 B2 B1 B0
        worker 2  F0 F1 F2 B2 B1 B0
    """
    slots = count(first_slot)
    micro_batches = workers * replicas
    for step in steps:
        for phase in range(2 * stages):
            members = range(step * micro_batches, (step + 1) * micro_batches)
            yield Slot(next(slots), tuple(_compute(micro_batch, phase, stages) for micro_batch in members))


def sequential(
    workers: int, stages: int, steps: Iterable[int], first_slot: int = 0, replicas: int = 1
) -> Iterator[Slot]:
    """Gradient accumulation: a worker begins when the one before has finished, in slot 2S(tN + i).

    N = S = 2, one training step:

        slot      0  1  2  3  4  5  6  7
        worker 0  F0 F1 B1 B0
        worker 1              F0 F1 B1 B0
    """
    slots = count(first_slot)
    for step in steps:
        for worker in range(step * workers, (step + 1) * workers):
            for phase in range(2 * stages):
                members = range(worker * replicas, (worker + 1) * replicas)
                yield Slot(next(slots), tuple(_compute(micro_batch, phase, stages) for micro_batch in members))


def cyclic(workers: int, stages: int, steps: Iterable[int], first_slot: int = 0, replicas: int = 1) -> Iterator[Slot]:
    """Cyclic data parallelism (the paper's figure 1): micro-batch m starts in slot 2cm, with S = cN stages.

    Its forward of stage j is in slot 2cm + j, its backward in slot 2cm + 2S-1-j; slots count from the first
    micro-batch of `steps`, which starts in `first_slot`. With R replicas, R micro-batches start together.
    N = S = 3, two training steps:

        slot      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        worker 0  F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 1        F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 2              F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
    """
    delay = 2 * (stages // workers)
    upcoming = (step * workers + worker for step in steps for worker in range(workers))
    in_flight: deque[tuple[int, int]] = deque()
    for slot in count(first_slot):
        if (slot - first_slot) % delay == 0 and (begun := next(upcoming, None)) is not None:
            in_flight.append((begun, slot))
        if not in_flight:
            return
        yield Slot(
            slot,
            tuple(
                _compute(begun * replicas + replica, slot - start, stages)
                for begun, start in in_flight
                for replica in range(replicas)
            ),
        )
        if slot - in_flight[0][1] == 2 * stages - 1:
            in_flight.popleft()


def gpipe(workers: int, stages: int, steps: Iterable[int], first_slot: int = 0, replicas: int = 1) -> Iterator[Slot]:
    """Data parallelism on a pipeline: all forwards, then all backwards, then a flush (Huang et al. 2019).

    Worker i runs stage j forward in slot i + j of a training step and backward in slot N+S-1 + i + S-1-j.
    N = S = 3, one training step:

        slot      0  1  2  3  4  5  6  7  8  9
        stage 0   F  F  F              B  B  B
        stage 1      F  F  F        B  B  B
        stage 2         F  F  F  B  B  B
    """
    table = _by_slot(lambda worker, stage: (worker + stage, workers + 2 * stages - 2 + worker - stage), workers, stages)
    return _flushing(table, workers, steps, first_slot, replicas)


def one_f_one_b(
    workers: int, stages: int, steps: Iterable[int], first_slot: int = 0, replicas: int = 1
) -> Iterator[Slot]:
    """Data parallelism on a pipeline: a backward as soon as one is due, with a flush (1F1B, Narayanan et al. 2019).

    Stage j runs its first S-j forwards at once, in slots i + j, and then one forward after each backward: in slot
    2i + j; its backwards are in slots 2i + 2S-1-j. No stage holds more than S-j micro-batches. N = S = 3:

        slot      0  1  2  3  4  5  6  7  8  9
        stage 0   F  F  F        B     B     B
        stage 1      F  F     B  F  B     B
        stage 2         F  B  F  B  F  B
    """

    def slots_of(worker: int, stage: int) -> tuple[int, int]:
        forward = worker + stage if worker < stages - stage else 2 * worker + stage
        return forward, 2 * worker + 2 * stages - 1 - stage

    return _flushing(_by_slot(slots_of, workers, stages), workers, steps, first_slot, replicas)


_Table = list[list[tuple[Op, int, int]]]


def _by_slot(slots_of: Callable[[int, int], tuple[int, int]], workers: int, stages: int) -> _Table:
    """Return, for each slot of a training step, its (op, stage, worker), given each worker's slots in each stage."""
    table: _Table = [[] for _ in range(2 * (workers + stages - 1))]
    for worker in range(workers):
        for stage in range(stages):
            forward, backward = slots_of(worker, stage)
            table[forward].append((Op.FORWARD, stage, worker))
            table[backward].append((Op.BACKWARD, stage, worker))
    return table


def _flushing(table: _Table, workers: int, steps: Iterable[int], first_slot: int, replicas: int) -> Iterator[Slot]:
    slots = count(first_slot)
    for step in steps:
        for row in table:
            yield Slot(
                next(slots),
                tuple(
                    Action(op, stage, (step * workers + worker) * replicas + replica)
                    for op, stage, worker in row
                    for replica in range(replicas)
                ),
            )


def _compute(micro_batch: int, phase: int, stages: int) -> Action:
    """Return what a micro-batch does `phase` slots after its start: S forwards, then S backwards."""
    if phase < stages:
        return Action(Op.FORWARD, phase, micro_batch)
    return Action(Op.BACKWARD, 2 * stages - 1 - phase, micro_batch)


TIMELINES: dict[str, Generator] = {
    "simultaneous": simultaneous,
    "sequential": sequential,
    "cyclic": cyclic,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}
