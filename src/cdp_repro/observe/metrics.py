"""The metrics of a run: JSON lines are the source of truth, W&B is a mirror."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.json_values import from_json, valid_json
from cdp_repro.observe.run_directory import RunDirectoryError, writing


class Mirror(Protocol):
    """Receives a copy of every row of the metrics; it must not raise."""

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Receive one row."""


class MetricsLog:
    """Append-only metrics.jsonl. A last line that a kill cut short is dropped at opening.

    Raises RunDirectoryError if the file is damaged elsewhere, or if a row cannot be written; the rows before it stay.
    """

    def __init__(self, path: Path, mirror: Mirror | None = None) -> None:
        self.path = Path(path)
        self._mirror = mirror
        if self.path.exists():
            os.truncate(self.path, sum(len(line) for line, _ in _rows(self.path)))
        self._file = _appending(self.path)

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append one row {"step": step, **values}; keys carry their unit. NaN becomes "NaN", inf "Infinity"."""
        for key, value in values.items():
            if key == "step" or not isinstance(value, float | int | str):
                raise TypeError(f"metric {key!r} is a {type(value).__name__}: pass float, int or str, and no 'step'")
        row = json.dumps(valid_json({"step": step, **values}), allow_nan=False) + "\n"
        self._append(row.encode())
        if self._mirror is not None:
            self._mirror.log(step, values)

    def truncate_after(self, step: int, last_key: str | None = None) -> None:
        """Drop the rows of steps later than `step`, so that a run resumed there holds each row once.

        With `last_key`, also drop the row with that key at `step`: the resumed run logs it again.
        """
        kept = b"".join(
            line
            for line, row in _rows(self.path)
            if row["step"] < step or (row["step"] == step and last_key not in row)
        )
        self._file.close()
        with writing(self.path):
            replace_file(self.path, kept)
        self._file = _appending(self.path)

    def close(self) -> None:
        """Close the file; the mirror is ended separately."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        rest = line
        try:
            with writing(self.path):
                while rest:  # a nearly full disk may take only a part
                    rest = rest[self._file.write(rest) :]
        except RunDirectoryError:
            os.truncate(self.path, size)
            raise


def _appending(path: Path) -> FileIO:
    """Open a file at its end, unbuffered, so that a row is in it when `log` returns."""
    with writing(path):
        return path.open("ab", buffering=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl in file order, "NaN" and "Infinity" as floats; a torn last line is left out.

    Raises RunDirectoryError with the line number if another line is damaged.
    """
    return [{key: from_json(value) for key, value in row.items()} for _, row in _rows(Path(path))]


def _rows(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return each whole line with its row; a torn last line is left out."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append((line, row))
        elif number < len(lines):
            raise RunDirectoryError(
                f"{path}, line {number} of {len(lines)} is damaged: {line[:60]!r}. Delete that line, or the file: the "
                "run then goes on without what it held"
            )
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line; None if the line is torn or holds something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None
