"""A trace as tables: one row per action, per message, or per slot and rank."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import chain
from typing import IO

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.trace.record import Trace


def write_actions_csv(trace: Trace, file: IO[str]) -> None:
    """Write one row per action: slot, rank, step, worker, label."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["slot", "rank", "step", "worker", "action"])
    for record in trace.records:
        for action in record.actions:
            step, worker = step_and_worker(action, trace)
            writer.writerow([record.slot, record.rank, step, worker, action.label])


def write_comms_csv(trace: Trace, file: IO[str]) -> None:
    """Write one row per message: slot, source and destination rank, kind, stage, bytes."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["slot", "source", "destination", "kind", "stage", "bytes"])
    writer.writerows((m.slot, m.source, m.destination, m.kind, m.stage, m.bytes) for m in trace.messages)


def write_memory_csv(trace: Trace, file: IO[str], version_bytes: Callable[[int, int], int]) -> None:
    """Write a row for each slot in which a rank acts: bytes of activations and parameters, versions of each stage.

    Activation bytes are the most during the slot, the others are those at its end. Where a rank keeps fewer activations
    after a slot, the idle slot that follows has a row, too: without one a rank has what its last row says.
    `version_bytes` maps a rank and a stage to the bytes of one version of the stage's parameters there.
    """
    writer = csv.writer(file, lineterminator="\n")
    stages = [f"versions_stage_{stage}" for stage in range(trace.sizes.stages)]
    writer.writerow(["slot", "rank", "activation_bytes", "parameter_bytes", *stages])
    last: dict[int, int] = {}
    for record in chain.from_iterable(trace.of_each_slot()):
        if not record.actions and last[record.rank] == record.activation_peak_bytes:
            continue
        last[record.rank] = record.activation_peak_bytes
        live = sum(number * version_bytes(record.rank, stage) for stage, number in enumerate(record.versions) if number)
        writer.writerow([record.slot, record.rank, record.activation_peak_bytes, live, *record.versions])


def step_and_worker(action: Action, trace: Trace) -> tuple[int | None, int | None]:
    """Return the training step and worker of a compute action; for an update only the step, for others neither."""
    if action.op.is_compute:
        return action.micro_batch // trace.sizes.micro_batches, trace.lanes.worker_of(action.micro_batch)
    return ((action.version - 1) // trace.sizes.updates if action.op is Op.UPDATE else None), None
