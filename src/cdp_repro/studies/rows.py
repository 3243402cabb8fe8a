"""Rows: the part of a finished run that tables and figures need, as one small JSON file that is committed.

results/rows/<study>/<mode>-...-seed<k>-<hash>.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cdp_repro.config.keys import RUN_KEYS, defaults, flat
from cdp_repro.config.task import task_of
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.versions import devices
from cdp_repro.predict.costs import StageCosts
from cdp_repro.schedule import Action, Slot

FORMAT = 1

DIVERGED = "diverged"
"""Status of a run whose loss is no longer finite; also a key in the summary of its row."""

NEEDED = (
    "dataset/description", "dataset/fingerprint", "hardware", "ledger/reads", "staleness", "step", "version/code",
    "version/git_commit", "version/python", "version/torch",
)  # fmt: skip
"""Entries of a summary without which no table can show a run."""

ROWS = "rows"
"""Folder of the rows, below that of the results."""


class RowError(ValueError):
    """A row, or a run directory that should become one, cannot be used; the message names the file and the way out."""


@dataclass(frozen=True)
class Row:
    """One finished run."""

    study: str
    config: Mapping[str, Any]
    """Settings by dotted key, without `RUN_KEYS` but with the seed."""
    command: str
    summary: Mapping[str, Any]
    """summary.json without entries that repeat `config`."""
    epochs: Mapping[str, Sequence[float]]
    """What was logged at the end of each epoch, by its key in metrics.jsonl."""
    activation_bytes: Sequence[int]
    """Live activation bytes in each traced slot; empty where several ranks ran."""
    sent_bytes: Sequence[int]
    """Bytes sent by all ranks in each traced slot, from slot 0."""
    actions: Sequence[str]
    """The compute actions of each traced slot, as text with blanks between; empty for many micro-batches."""
    source: str = field(default="", compare=False)
    """The file that the row was read from, for messages."""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @cached_property
    def cell(self) -> str:
        """A hash of all settings that matter, without the seed: runs of one cell may be averaged."""
        return cell_hash(self.config)

    @property
    def has_diverged(self) -> bool:
        """Whether its loss stopped being finite, where that is a result."""
        return DIVERGED in self.summary

    @property
    def code(self) -> str:
        """Hash of the code that the numbers depend on."""
        return str(self.summary["version/code"])

    @property
    def device(self) -> str:
        """What it ran on, such as `NVIDIA H200` or `x86_64 CPU`, whatever the number of threads."""
        return devices(self.summary["hardware"])

    @property
    def costs(self) -> StageCosts:
        """The costs of each stage on one micro-batch."""
        return StageCosts(**{name: tuple(values) for name, values in self.summary["stages/costs"].items()})

    @cached_property
    def digest(self) -> str:
        """A hash of everything in it."""
        return _digest(_content(self))

    def slots(self) -> list[Slot]:
        """Return the compute of the traced slots."""
        return [
            Slot(k, tuple(Action.parse(f"{label}: ->") for label in text.split()))
            for k, text in enumerate(self.actions)
        ]

    @property
    def file_name(self) -> str:
        """Name of the row's file."""
        return f"{run_name(self.config, self.cell, self.seed)}.json"


def run_name(settings: Mapping[str, Any], cell: str, seed: int) -> str:
    """Return the name of a run: readable, and different for different runs."""
    where = settings["baseline"] or settings["placement.name"]
    parts = [settings["dataset.name"], settings["model.name"], label_of_mode(settings), where]
    return "-".join([*parts, f"N{settings['workers']}", f"seed{seed}", cell]).replace("/", "-")


def label_of_mode(config: Mapping[str, Any]) -> str:
    """Return the mode, as shown to people: its name, or `staleness2` for a matrix of twos."""
    staleness = config.get("mode.staleness")
    if config["mode.name"] != "matrix" or not staleness:
        return str(config["mode.name"])
    values = {delay for row in staleness for delay in row}
    return f"staleness{values.pop()}" if len(values) == 1 else "matrix"


def cell_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the settings, by dotted key, that matter to the numbers of a run, without the seed.

    Settings at their default are left out, so that a new setting changes no hash.
    """
    usual = defaults()
    relevant = {key: value for key, value in config.items() if key not in RUN_KEYS and value != usual.get(key)}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:12]


def write_row(row: Row, folder: Path) -> Path:
    """Write the row into its study's folder below `folder`; return the file. The same row again changes nothing.

    Raises:
        RowError: there is another row of the same cell and seed, or the folder cannot be written.
    """
    path = folder / row.study / row.file_name
    if path.exists():
        refuse_another(row, folder)
        return path
    lines = {"format": FORMAT, **_content(row), "digest": row.digest}.items()
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in lines) + "\n}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise RowError(f"cannot write {path}: {error.strerror or error}; pass another --results=") from error
    return path


def refuse_another(row: Row, folder: Path) -> None:
    """Raise RowError if the file that `write_row` would write holds another row."""
    path = folder / row.study / row.file_name
    if path.exists() and (present := read_row(path)) != row:
        raise RowError(
            f"{path} already holds a run of this cell and seed with other numbers "
            f"({_first_difference(present, row)}): remove that file first if the new run shall replace it"
        )


def read_row(path: Path) -> Row:
    """Return the row of a file. Raises RowError if it is damaged or not a row."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RowError(
            f"{path} cannot be read ({error}): restore it from git, or remove it and collect again"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RowError(f"{path} is not a row of format {FORMAT}: remove it")
    content = {key: value for key, value in found.items() if key not in ("format", "digest")}
    if found.get("digest") != _digest(content):
        raise RowError(f"{path} is damaged, its digest differs: restore it from git, or remove it and collect again")
    try:
        row = Row(**{**content, "config": {**_defaults_that_matter(), **content["config"]}}, source=str(path))
        lacks = lacking(row.summary, row.config)
    except (KeyError, TypeError) as error:
        raise _of_another_version(path, error) from error
    if lacks:
        raise _of_another_version(path, f"its summary lacks {', '.join(lacks)}")
    return row


def lacking(summary: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return what tables need and a summary lacks; a run that has diverged needs no numbers of its end."""
    ends = () if DIVERGED in summary else ("train/loss", task_of(config["dataset.name"]).metric)
    return [key for key in (*NEEDED, *ends) if key not in summary]


def _of_another_version(path: Path, why: object) -> RowError:
    return RowError(f"{path} is a row of another version ({why}): remove it, and collect the run again")


def read_rows(folder: Path) -> list[Row]:
    """Return all rows below a folder, by study, cell and seed.

    Raises:
        RowError: lists what is wrong in all files: damaged or foreign rows, two runs of one cell with one seed, a row
            in the folder of another study.
    """
    rows, problems = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            rows.append(read_row(path))
        except RowError as error:
            problems.append(str(error))
            continue
        if rows[-1].study != path.parent.name:
            problems.append(f"{path} is of the study {rows[-1].study!r}: move it to {folder / rows[-1].study}")
    seen: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        other = seen.setdefault((row.study, row.cell, row.seed), row)
        if other is not row:
            problems.append(f"{other.source} and {row.source} are the same cell with the same seed: remove one of them")
    if problems:
        raise RowError("\n".join(problems))
    return sorted(rows, key=lambda row: (row.study, row.file_name, row.seed))


def _content(row: Row) -> dict[str, Any]:
    return {
        "study": row.study,
        "config": dict(row.config),
        "command": row.command,
        "summary": dict(row.summary),
        "epochs": {key: list(values) for key, values in row.epochs.items()},
        "activation_bytes": list(row.activation_bytes),
        "sent_bytes": list(row.sent_bytes),
        "actions": list(row.actions),
    }


def _defaults_that_matter() -> dict[str, Any]:
    return {key: value for key, value in defaults().items() if key not in RUN_KEYS}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _first_difference(one: Row, other: Row) -> str:
    ours, theirs = flat(_content(one)), flat(_content(other))
    key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    return f"{key}: {str(ours.get(key))[:40]} there, {str(theirs.get(key))[:40]} now"
