"""Groups: runs that differ in nothing but the seed, their mean and spread, and how two groups compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.special import stdtr, stdtrit  # Student's t by (degrees, x), without the second that scipy.stats takes

from cdp_repro.config.keys import RUN_KEYS
from cdp_repro.observe.versions import short
from cdp_repro.schedule import MODES
from cdp_repro.studies.rows import Row, RowError, label_of_mode

GROUP_KEYS = (
    "dataset.name", "model.name", "placement.name", "baseline", "pipeline_schedule", "collectives", "workers",
    "replicas", "partition", "slot_order",
)  # fmt: skip
"""Settings that, with the mode, tell the groups of a study apart; all others must be the same in a group."""

MAY_DIFFER = ("mode.name", "mode.staleness", "optim.lr")
"""Settings in which a group may differ from the data parallelism it is compared with, because tables show them."""

CONFIDENCE = 0.95

OF_TWO_VERSIONS = (
    "Where a difference is `of two versions`, the code of the two sides differs, and where it is `of two devices`, "
    "what they ran on: commits and hardware are below."
)
"""For the notes of a table that shows differences."""

_PLACES = {mode: place for place, mode in enumerate(MODES)}


@dataclass(frozen=True)
class Group:
    """Runs of one cell."""

    rows: tuple[Row, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the first run; all runs share them, except for `RUN_KEYS`."""
        return self.rows[0].config

    @property
    def cell(self) -> str:
        """The cell of its runs."""
        return self.rows[0].cell

    @property
    def finished(self) -> Group | None:
        """Its runs that have not diverged; None if all have."""
        rows = tuple(row for row in self.rows if not row.has_diverged)
        return Group(rows) if rows else None

    @property
    def diverged(self) -> int:
        """Number of its runs that have diverged."""
        return sum(row.has_diverged for row in self.rows)

    @property
    def mode(self) -> str:
        """The mode, as shown to people."""
        return label_of_mode(self.config)

    @property
    def stale_share(self) -> float:
        """The share, 0 to 1, of reads of parameters that are not of the newest version."""
        delays = [delay for stages in self.rows[0].summary["staleness"] for delay in stages]
        return float(sum(delay > 0 for delay in delays) / len(delays))

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, in order."""
        return [row.seed for row in self.rows]

    def values(self, key: str) -> list[float]:
        """Return one number of the summary of each run."""
        return [float(row.summary[key]) for row in self.rows]

    def sample(self, key: str) -> Sample:
        """Return mean and spread of a number of the summary."""
        return Sample.from_values(self.values(key))


@dataclass(frozen=True)
class Sample:
    """Mean and standard deviation (NaN for one value) of n values."""

    mean: float
    deviation: float
    n: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Sample:
        """Return the sample of at least one value."""
        deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        return cls(statistics.fmean(values), deviation, len(values))

    def text(self, digits: int = 2) -> str:
        """Return `mean ± deviation (n)`, or `mean (1)`."""
        spread = f" ± {self.deviation:.{digits}f}" if self.n > 1 else ""
        return f"{self.mean:.{digits}f}{spread} ({self.n})"


@dataclass(frozen=True)
class Difference:
    """Mean difference of two groups over the seeds that both have, with its confidence interval and a paired test."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int
    error: float = math.nan
    """Standard error of the mean."""
    is_of_one_code: bool = True
    """Whether the runs of both groups come from the same version of the code."""
    is_of_one_device: bool = True
    """Whether they ran on the same kind of device."""

    def text(self, digits: int = 2) -> str:
        """Return `-0.12 [-0.40, +0.16] (5)`, `-0.12 (1)`, or `-0.12 (1, of two versions)`."""
        low, mean, high = (
            f"{round(each, digits) + 0.0:+.{digits}f}"  # + 0.0: no minus before a zero
            for each in (self.low, self.mean, self.high)
        )
        interval = "" if math.isnan(self.low) else f" [{low}, {high}]"
        versions = "" if self.is_of_one_code else ", of two versions"
        devices = "" if self.is_of_one_device else ", of two devices"
        return f"{mean}{interval} ({self.n}{versions}{devices})"

    @classmethod
    def paired(cls, ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
        """Return ours - theirs, both by seed; None without a common seed.

        Interval, p and error are NaN where nothing shows how far seeds differ: with one seed, or equal differences
        (which coarse numbers give by chance, and whose interval of width 0 would be sure of them). So they are where a
        value is not finite.
        """
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        n = len(differences)
        if not n:
            return None
        mean = statistics.fmean(differences)
        if n == 1 or not math.isfinite(mean) or _are_equal(differences):
            return cls(mean, math.nan, math.nan, math.nan, n)
        error = statistics.stdev(differences) / math.sqrt(n)
        half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
        p_value = 2 * float(stdtr(n - 1, -abs(mean) / error))
        return cls(mean, mean - half, mean + half, p_value, n, error)


def _are_equal(values: Sequence[float]) -> bool:
    """Return whether values differ by no more than rounding."""
    return max(values) - min(values) <= 1e-9 * max(map(abs, values))


def grouped(rows: Iterable[Row], varied: Sequence[str] = ()) -> list[Group]:
    """Return the groups of one study, the paper's modes first; `varied` settings also tell groups apart, in order.

    Raises:
        RowError: two runs that a table would average differ in a setting that matters, in their code or in their
            data; it names the files and what differs.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = label_of_mode(row.config), *(row.config[name] for name in (*GROUP_KEYS, *varied))
        groups.setdefault(key, []).append(row)
    problems = [problem for members in groups.values() for problem in _mixed(members)]
    if problems:
        raise RowError("\n".join(problems))
    found = [Group(tuple(sorted(members, key=lambda row: row.seed))) for members in groups.values()]

    def place(group: Group) -> tuple[object, ...]:
        return _PLACES.get(group.mode, len(_PLACES)), group.mode, *(group.config[key] for key in varied)

    return sorted(found, key=place)  # stable


def _mixed(rows: Sequence[Row]) -> Iterable[str]:
    first = rows[0]
    for row in rows[1:]:
        if keys := differing(first, row):
            yield (
                f"{first.source} and {row.source} would be averaged, but differ in {', '.join(keys)}: keep them in "
                "different studies (cdp-report collect --study=NAME)"
            )
        elif first.code != row.code:
            yield (
                f"{first.source} (commit {short(first.summary['version/git_commit'])}) and {row.source} (commit "
                f"{short(row.summary['version/git_commit'])}) would be averaged, but their code differs: train one of "
                "them again with the code of the other"
            )
        elif first.device != row.device:
            yield (
                f"{first.source} (on {first.device}) and {row.source} (on {row.device}) would be averaged: keep them "
                "in different studies (cdp-report collect --study=NAME)"
            )
        elif said := other_data(first.source, first.summary, row.source, row.summary):
            yield f"{said}: keep them in different studies (cdp-report collect --study=NAME)"


def other_data(one: str, ours: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> str:
    """Return that two runs would be averaged but differ in their data; empty if they do not.

    `one` and `other` name the runs, `ours` and `theirs` are their summaries.
    """
    if ours.get("dataset/fingerprint") == theirs.get("dataset/fingerprint"):
        return ""
    first, second = (f"{name} ({said.get('dataset/description')})" for name, said in ((one, ours), (other, theirs)))
    return f"{first} and {second} would be averaged, but their data differ"


def differing(one: Row, other: Row) -> list[str]:
    """Return the keys in which two runs differ, except for `RUN_KEYS` such as the seed."""
    keys = (key for key in {**one.config, **other.config} if key not in RUN_KEYS)
    return sorted(key for key in keys if one.config.get(key) != other.config.get(key))


def data_parallel(groups: Iterable[Group], like: Group, shared: Sequence[str] = ()) -> Group | None:
    """Return the data parallelism that a group is compared with; None if there is none.

    It has the data, the model and the `shared` settings of `like`. Of several, it is the one that differs in the fewest
    other settings, and of several such the first.
    """
    keys = ("dataset.name", "model.name", *shared)
    alike = (g for g in groups if g.mode == "dp" and all(g.config[key] == like.config[key] for key in keys))
    return min(alike, key=lambda dp: len({*differing(dp.rows[0], like.rows[0])} - {*MAY_DIFFER}), default=None)


def _data_of(row: Row) -> str:
    return f"{row.summary['dataset/description']}, fingerprint {row.summary['dataset/fingerprint'][:12]}"


def compared(group: Group, reference: Group, key: str, varied: Sequence[str] = ()) -> Difference | None:
    """Return how a number of the summary differs between two groups, seed by seed; None without a common seed.

    Raises:
        RowError: they differ in their data, or in more than the mode, the learning rate and `varied`, which the table
            shows.
    """
    ours, theirs = group.rows[0], reference.rows[0]
    others = set(differing(ours, theirs)) - {*MAY_DIFFER, *varied}
    if ours.summary["dataset/fingerprint"] != theirs.summary["dataset/fingerprint"]:
        others |= {f"their data ({_data_of(ours)}; {_data_of(theirs)})"}
    if others:
        raise RowError(
            f"{ours.source} and {theirs.source} would be compared, but differ in "
            f"{', '.join(sorted(others))}: keep them in different studies (cdp-report collect --study=NAME)"
        )
    found = Difference.paired(
        dict(zip(group.seeds, group.values(key), strict=True)),
        dict(zip(reference.seeds, reference.values(key), strict=True)),
    )
    alike = {"is_of_one_code": ours.code == theirs.code, "is_of_one_device": ours.device == theirs.device}
    return found and replace(found, **alike)
