"""From the directory of a finished run to its row."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdp_repro.config.keys import PLACEMENT_KEYS, RUN_KEYS, settings_of
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError
from cdp_repro.schedule import Op
from cdp_repro.studies.rows import DIVERGED, Row, RowError, lacking

_DRAWN_WORKERS = 8
"""Up to this many workers, a row holds the actions of the traced steps."""


def collect(run_dir: Path, study: str, diverged_too: bool = False) -> Row:
    """Return the row of a finished run; with `diverged_too`, also of one whose loss stopped being finite.

    Raises:
        RunDirectoryError: `run_dir` is not a run directory, or damaged.
        RowError: the run is not finished, or its files do not belong together.
    """
    try:
        return _collected(run_dir, study, diverged_too)
    except (RowError, RunDirectoryError):
        raise
    except (OSError, ValueError, LookupError) as error:
        raise RowError(f"{run_dir} is damaged ({error!r}): put back what it held, or train again") from error


def _collected(run_dir: Path, study: str, diverged_too: bool) -> Row:
    run = RunDirectory.open(run_dir)
    summary = run.summary()
    diverged = diverged_too and summary.get("status") == DIVERGED
    if summary.get("status") != "finished" and not diverged:
        state = summary.get("status", "unfinished")
        if state == DIVERGED:
            raise RowError(
                f"{run_dir} has {DIVERGED}: its loss is not finite, which is a result only in studies that count it; "
                "train with other settings, such as a smaller optim.lr"
            )
        raise RowError(f"{run_dir} is {state}: finish it by cdp-train resume={run_dir}, and collect it then")
    began, config = map(settings_of, (run.config(), run.config_at_end()))
    own = _own(summary) | ({DIVERGED: True} if diverged else {})
    if missing := lacking(own, config):
        raise RowError(f"{run.summary_path} lacks {', '.join(missing)}: it is of an older version; train again")
    epochs = _epochs(read_metrics(run.metrics_path))
    if len(epochs.get("epoch", ())) != config["epochs"] and not diverged:
        raise RowError(
            f"{run.metrics_path} holds the ends of {len(epochs.get('epoch', ()))} epochs, the run has "
            f"{config['epochs']}: the file is damaged; train again"
        )
    return Row(
        study=study,
        config={key: value for key, value in config.items() if key not in RUN_KEYS or key == "seed"},
        command=_command(run.commands()[0], _moved(began, config)),
        summary=own | _parameter_peak(run.memory_path),
        epochs=epochs,
        activation_bytes=_activation_bytes(run.memory_path) if summary["ranks"] == 1 else [],
        sent_bytes=_sent_bytes(run.comms_path),
        actions=_actions(run.trace_path) if summary["workers"] <= _DRAWN_WORKERS else [],
        source=str(run_dir),
    )


def _own(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary without paths and without entries that repeat the configuration."""
    said = {
        "config", "command", "run_dir", "status", "mode", "placement", "stages", "replicas", "baseline", "model",
        "optim", "delay", "workers", "dataset", "seed", "epochs", "stages/blocks",
    }  # fmt: skip
    return {key: value for key, value in summary.items() if key not in said}


def _moved(began: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, as they are given, of the placement on which a run has ended if it began on another."""
    keys = [key for key in PLACEMENT_KEYS if began[key] != ended[key]]
    return {key.removesuffix(".name"): ended[key] for key in keys}


def _command(line: str, moved: Mapping[str, Any]) -> str:
    """Return the command line without options that locate files, and with the settings `moved` in place of its own."""
    out = {"run_dir", "dataset.root", "wandb", "wandb_project", *moved}
    words = [text for text in shlex.split(line) if text.partition("=")[0] not in out]
    return shlex.join([*words, *(f"{key}={value}" for key, value in moved.items() if value is not None)])


def _epochs(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    ends = [row for row in rows if "train/epoch_loss" in row]
    keys = dict.fromkeys(key for row in ends for key in row if key != "step")
    return {key: [row[key] for row in ends if key in row] for key in keys}


def _activation_bytes(path: Path) -> list[int]:
    """Return the bytes of each traced slot of a run on one device."""
    found = {int(line["slot"]): int(line["activation_bytes"]) for line in _lines(path)}
    filled: list[int] = []
    for slot in range(min(found, default=0), max(found, default=-1) + 1):
        filled.append(found.get(slot, filled[-1] if filled else 0))
    return filled


def _parameter_peak(path: Path) -> dict[str, int]:
    """Return the most parameter bytes, of all versions, that a rank has held at the end of a traced slot."""
    held = [int(line["parameter_bytes"]) for line in _lines(path)]
    return {"memory/parameter_peak_bytes_per_device": max(held)} if held else {}


def _sent_bytes(path: Path) -> list[int]:
    sent: dict[int, int] = {}
    for line in _lines(path):
        sent[int(line["slot"])] = sent.get(int(line["slot"]), 0) + int(line["bytes"])
    return [sent.get(slot, 0) for slot in range(max(sent, default=-1) + 1)]


def _lines(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file; none if nothing was traced, as in a library's run."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def _actions(path: Path) -> list[str]:
    if not path.exists():
        return []
    events = json.loads(path.read_text())
    by_slot: dict[int, list[str]] = {}
    compute = {op.name.lower() for op in Op if op.is_compute}
    for event in events["traceEvents"]:
        if event.get("cat") in compute:
            by_slot.setdefault(event["args"]["slot"], []).append(event["name"])
    return [" ".join(by_slot.get(slot, ())) for slot in range(max(by_slot, default=-1) + 1)]
