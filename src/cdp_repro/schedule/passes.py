"""Passes: each takes a lazy stream of slots and returns it with one thing added. None looks ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.rules import Mode


def order_slots(slots: Iterable[Slot], backward_first: bool) -> Iterator[Slot]:
    """Order the compute of each slot, which matters only where one device runs several workers.

    Forwards first is the paper's accounting: all activations of a slot are alive together. Backwards first
    frees memory before the forwards take it, which lowers the peak of equal stages from (N+1)/2 to N/2 times
    the activations of one micro-batch (for odd N: N/2 plus half a stage). Within each kind the order is that of
    the micro-batches, which is the order in which gradients are added.
    """
    for slot in slots:
        yield Slot(
            slot.number,
            tuple(sorted(slot.actions, key=lambda a: ((a.op is Op.FORWARD) is backward_first, a.micro_batch))),
        )


def assign_versions(slots: Iterable[Slot], mode: Mode) -> Iterator[Slot]:
    """Give each forward and backward of worker i, step t, stage j the version max(0, t - d(i, j))."""
    workers = len(mode.staleness)
    for slot in slots:
        versioned = []
        for action in slot.actions:
            assert action.micro_batch is not None
            step, worker = divmod(action.micro_batch, workers)
            versioned.append(action.at_version(max(0, step - mode.staleness[worker][action.stage])))
        yield Slot(slot.number, tuple(versioned))


def add_updates(slots: Iterable[Slot], workers: int) -> Iterator[Slot]:
    """Update a stage as soon as the last worker's backward has completed its gradient."""
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            if action.op is Op.BACKWARD and action.micro_batch is not None:
                step, worker = divmod(action.micro_batch, workers)
                if worker == workers - 1:
                    actions.append(Action(Op.UPDATE, action.stage, version=step + 1))
        yield Slot(slot.number, tuple(actions))


def add_frees(slots: Iterable[Slot], mode: Mode) -> Iterator[Slot]:
    """Free each version after the last action that reads it.

    Version v of stage j is read last in step v + max_i d(i, j), by the last worker that has this staleness; and
    it is read by the update that makes version v + 1. The later of the two is the update exactly if the stage
    has no stale reader. Freeing before the update keeps at most max_i d(i, j) + 1 versions (2 for CDP).
    """
    workers, stages = len(mode.staleness), len(mode.staleness[0])
    oldest = [mode.oldest(stage) for stage in range(stages)]
    last_reader = [
        max(worker for worker in range(workers) if mode.staleness[worker][stage] == oldest[stage])
        for stage in range(stages)
    ]
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            stage, delay = action.stage, oldest[action.stage]
            if action.op is Op.UPDATE and delay == 0:
                assert action.version is not None
                actions.append(Action(Op.FREE, stage, version=action.version - 1))
            elif action.op is Op.BACKWARD and delay > 0 and action.micro_batch is not None:
                step, worker = divmod(action.micro_batch, workers)
                if worker == last_reader[stage] and step >= delay:
                    actions.append(Action(Op.FREE, stage, version=step - delay))
        yield Slot(slot.number, tuple(actions))
