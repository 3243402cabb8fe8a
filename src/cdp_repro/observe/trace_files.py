"""A trace as files of a run directory, and as tables and pictures of W&B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cdp_repro.observe.atomic_file import replacing
from cdp_repro.observe.run_directory import RunDirectory, writing
from cdp_repro.observe.wandb_mirror import WandbMirror
from cdp_repro.trace import Trace, step_and_worker, write_comms_csv, write_memory_csv, write_perfetto

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_trace_files(trace: Trace, directory: RunDirectory, version_bytes: Callable[[int, int], int]) -> None:
    """Write trace.json, memory.csv and comms.csv; `version_bytes` as for `write_memory_csv`."""
    writers: tuple[Callable[[Trace, IO[str]], None], ...] = (
        write_perfetto,
        partial(write_memory_csv, version_bytes=version_bytes),
        write_comms_csv,
    )
    for path, write in zip(_files(directory), writers, strict=True):
        with writing(path), replacing(path) as file:
            write(trace, file)


def remove_trace_files(directory: RunDirectory) -> None:
    """Remove what `write_trace_files` has written, if it has."""
    for path in _files(directory):
        with writing(path):
            path.unlink(missing_ok=True)


def _files(directory: RunDirectory) -> tuple[Path, Path, Path]:
    return directory.trace_path, directory.memory_path, directory.comms_path


def mirror_trace(trace: Trace, mode: str, directory: RunDirectory, mirror: WandbMirror) -> None:
    """Log timeline, memory, ledger and messages to W&B: tables, pictures, an artifact."""
    reads = [
        (record.slot, action.label, *step_and_worker(action, trace), action.stage, action.version)
        for record in trace.records
        for action in record.actions
        if action.op.is_compute
    ]
    mirror.log_table("ledger", ["slot", "action", "step", "worker", "stage", "version"], reads)
    sent = [(m.slot, m.source, m.destination, m.kind, m.stage, m.bytes) for m in trace.messages]
    mirror.log_table("messages", ["slot", "source", "destination", "kind", "stage", "bytes"], sent)
    curve = trace.activation_bytes_per_slot
    mirror.log_table("memory", ["slot", "activation_bytes"], list(curve.items()))
    mirror.log_figure("timeline", partial(_timeline, trace, mode))
    mirror.log_figure("memory_curve", partial(_memory_curve, curve, mode))
    mirror.log_artifact(f"trace-{directory.path.name}", "trace", _files(directory))


def _timeline(trace: Trace, mode: str) -> Figure:
    from cdp_repro.observe.figures import timeline_figure  # here, as below: only a mirror that works draws

    slots = trace.slots[: 6 * trace.sizes.stages]
    return timeline_figure({mode: slots}, {mode: trace.lanes}, trace.sizes.stages)


def _memory_curve(curve: Mapping[int, int], mode: str) -> Figure:
    from cdp_repro.observe.figures import memory_figure

    return memory_figure({mode: curve}, "live activation bytes")
