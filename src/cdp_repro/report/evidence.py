"""Where numbers come from: one sentence for the runs behind a table or a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cdp_repro.observe.versions import joined, short
from cdp_repro.studies.rows import Row

_SHOWN = 12


def provenance(rows: Sequence[Row], study: str = "") -> list[str]:
    """Return the note on the runs behind a table and their commands; no note without runs."""
    return [f"{f'{study}: ' if study else ''}{_evidence(rows)} {_commands(rows)}."] if rows else []


def _evidence(rows: Sequence[Row]) -> str:
    """Return data, seeds, hardware, versions and commits of runs."""
    summaries = [row.summary for row in rows]
    data = " and ".join(dict.fromkeys(each["dataset/description"] for each in summaries))
    commit, torch, python, hardware = _origin(summaries)
    return (
        f"{len(rows)} run{'s' if len(rows) > 1 else ''}; data: {data}; seeds {_numbers(row.seed for row in rows)}; "
        f"{hardware}; torch {torch}, Python {python}; commit {commit}."
    )


def origin(results: Iterable[Mapping[str, Any]]) -> str:
    """Return commits, versions and hardware of results that carry the entries of `versions`."""
    commit, torch, python, hardware = _origin(list(results))
    return f"commit {commit}, torch {torch}, Python {python}, {hardware}"


def _origin(results: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Return the commits, versions of torch and of Python, and hardware of results, each once."""
    torch, python, hardware = (
        joined(each[name] for each in results) for name in ("version/torch", "version/python", "hardware")
    )
    return joined(short(each["version/git_commit"]) for each in results), torch, python, hardware


def _commands(rows: Iterable[Row]) -> str:
    """Return the command lines of runs, one for all seeds of a cell, as `code`."""
    seen = dict.fromkeys(_without_seed(row.command) for row in rows)
    shown = [f"`{command}`" for command in list(seen)[:_SHOWN]]
    rest = f" and {len(seen) - _SHOWN} more, see results/rows" if len(seen) > _SHOWN else ""
    return f"{', '.join(shown)}{rest}"


def _without_seed(command: str) -> str:
    return " ".join(word for word in command.split() if not word.startswith("seed="))


def _numbers(values: Iterable[int]) -> str:
    """Return numbers in order, consecutive ones as `0-4`."""
    parts: list[list[int]] = []
    for value in sorted(set(values)):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
