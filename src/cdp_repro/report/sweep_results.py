"""A sweep's results: a number of each finished run against a setting or the epoch, mean and spread over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cdp_repro.config import ConfigError
from cdp_repro.config.errors import collecting, nearest, refuse
from cdp_repro.config.keys import RUN_KEYS, settings_of
from cdp_repro.config.source import GROUPS
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError
from cdp_repro.report.groups import Sample, other_data
from cdp_repro.report.tables import Table
from cdp_repro.studies.cells import read_list
from cdp_repro.studies.status import run_state

EPOCH = "epoch"
"""Used in place of a setting: the number is read at the end of each epoch, counted from 1."""

Value = int | float | str
"""A setting's value, as tables and axes show it; lists and `null` as text."""

_TAKEN_FROM = {"dataset.name": ("batch_size", "epochs")}
"""Settings outside a group that take their default from its choice."""

_MOVE = "move one of the two folders out of the sweep's"


@dataclass(frozen=True)
class Finished:
    """One run of a sweep that has ended well."""

    name: str
    settings: Mapping[str, Value]
    """By dotted key."""
    summary: Mapping[str, Any]
    epochs: Mapping[Value, Mapping[str, float]]
    """What was logged at the end of each epoch, counted from 1."""

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Numbers of its summary."""
        return _numbers(self.summary)

    @property
    def code(self) -> str:
        """Hash of the code that it ran."""
        return str(self.summary.get("version/code"))

    def numbers_at(self, x: str) -> dict[Value, Mapping[str, float]]:
        """Return the numbers by their place on the axis `x`."""
        if x == EPOCH:
            return dict(self.epochs)
        return {self.settings[x]: self.numbers}


@dataclass(frozen=True)
class SweepResults:
    """The mean of `y` over seeds for each value of `x`, in a series for each combination of the settings `group`."""

    x: str
    y: str
    group: Sequence[str]
    series: Mapping[tuple[Value, ...], Mapping[Value, Sample]]
    left_out: Mapping[str, str]
    """Runs that are left out, by name, and why."""
    notes: Sequence[str]

    @property
    def file_name(self) -> str:
        """Name of the files of table and figure, without suffix."""
        return f"{self.y}_by_{self.x}".replace("/", "-")

    def label(self, values: tuple[Value, ...]) -> str:
        """Return the name of a series."""
        if len(self.group) == 1:
            return str(values[0])
        return ", ".join(f"{key}={value}" for key, value in zip(self.group, values, strict=True))

    def table(self) -> Table:
        """Return a row for each point: the settings of its series, x, mean, standard deviation, number of runs."""
        rows = [
            [*map(str, values), str(x), f"{sample.mean:.6g}", _spread(sample), str(sample.n)]
            for values, points in self.series.items()
            for x, sample in points.items()
        ]
        columns = [*self.group, self.x, f"mean of {self.y}", "standard deviation", "runs"]
        return Table(self.file_name, f"{self.y} by {self.x}", columns, rows, self.notes)


def _spread(sample: Sample) -> str:
    return f"{sample.deviation:.3g}" if sample.n > 1 else ""


def sweep_results(root: Path, x: str | None, y: str | None, group: Sequence[str] | None = None) -> SweepResults:
    """Return `y` by `x` from the finished runs of a sweep.

    `x` and `group` are settings by dotted key, or groups such as `mode`; `x` may be `EPOCH`. `y` is a number of the
    summary, or of the end of each epoch. By default `group` is the settings besides `x` that tell the runs apart.

    Raises:
        ConfigError: the folder is not of a sweep, or of another version; no run has finished; a key is unknown; runs
            that would be averaged differ in more than the seed or in their data, or have one seed and other numbers.
    """
    runs, left_out = _read(root)
    x, y, chosen = _asked_for(x, y, group or (), runs)
    # of the runs that are left out, too: what is left needs to be told from them
    keys = _telling_apart(runs, x, _settings_of(root, left_out)) if group is None else chosen
    left_out |= {run.name: f"has no {y}" for run in runs if not _has(run, x, y)}
    runs = [run for run in runs if run.name not in left_out]
    left_out |= _repeats(runs, x, y, keys)
    runs = [run for run in runs if run.name not in left_out]
    by_series: dict[tuple[Value, ...], list[Finished]] = {}
    for run in runs:
        by_series.setdefault(tuple(run.settings[key] for key in keys), []).append(run)
    series = {values: _points(members, x, y) for values, members in by_series.items()}
    versions = len({run.code for run in runs})
    notes = [f"The runs are of {versions} versions of the code: compare them with care."] if versions > 1 else []
    return SweepResults(x, y, keys, series, left_out, notes)


def _asked_for(
    x: str | None, y: str | None, group: Sequence[str], runs: Sequence[Finished]
) -> tuple[str, str, list[str]]:
    """Return the axis, the number and the settings of the lines by their full keys; refuse all mistakes at once."""
    axis, number, problems = "", "", list[str]()
    with collecting(problems):
        axis = _known_setting("--x", x, runs, [EPOCH])
    with collecting(problems):
        number = _known_number(y, axis or "seed", runs)  # the numbers are the same against any setting
    chosen = list[str]()
    for key in group:
        with collecting(problems):
            chosen.append(_known_setting("--group", key, runs))
    refuse(problems)
    return axis, number, chosen


def _read(root: Path) -> tuple[list[Finished], dict[str, str]]:
    """Return the finished runs of a sweep, and the state of every other run by its name."""
    noted = read_list(root)
    states = {name: run_state(root / name, None, noted.job_outputs(root, name)) for name in noted.epochs}
    found, unfinished = [], {name: state for name, state in states.items() if state != "finished"}
    for name in [each for each in states if each not in unfinished]:
        try:
            found.append(_finished(root / name))
        except (OSError, RunDirectoryError) as error:
            unfinished[name] = f"damaged ({error})"
    if not found:
        said = ", ".join(f"{name} is {state}" for name, state in unfinished.items())
        way_on = f"start the sweep again with run_dir={root} to go on"
        raise ConfigError([f"no run of {root} has finished: {said or 'it has none'}; {way_on}"])
    return found, unfinished


def _finished(directory: Path) -> Finished:
    run = RunDirectory.open(directory)
    ends = [_numbers(row) for row in read_metrics(run.metrics_path) if "train/epoch_loss" in row]
    epochs: dict[Value, Mapping[str, float]] = {int(row.pop("epoch")) + 1: row for row in ends if "epoch" in row}
    settings = _settings(run)
    if [*epochs] != [*range(1, len(ends) + 1)] or len(ends) != settings["epochs"]:
        raise RunDirectoryError(f"{run.metrics_path} lacks the ends of epochs")
    return Finished(directory.name, settings, run.summary(), epochs)


def _settings(run: RunDirectory) -> dict[str, Value]:
    return {key: _shown(value) for key, value in settings_of(run.config_at_end()).items()}


def _settings_of(root: Path, names: Iterable[str]) -> list[Mapping[str, Value]]:
    """Return the settings of runs that have begun, of those whose configuration can be read."""
    found: list[Mapping[str, Value]] = []
    for name in names:
        with suppress(RunDirectoryError):
            found.append(_settings(RunDirectory.open(root / name)))
    return found


def _shown(value: Any) -> Value:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else json.dumps(value)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value for key, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _known_setting(option: str, key: str | None, runs: Sequence[Finished], others: Sequence[str] = ()) -> str:
    """Return the dotted key of a setting; a group stands for its `.name`."""
    known = [*others, *runs[0].settings]
    if not key:
        differing = ", ".join([*others, *_differing(runs)])
        raise ConfigError([f"{option}= names no setting: in this sweep you can choose {differing}"])
    full = f"{key}.name" if key in GROUPS else key
    if full not in known:
        differing = ", ".join([*others, *_differing(runs)])
        raise ConfigError(
            [f"{option}={key}: no such setting; runs differ in {differing}{nearest(key, [*known, *GROUPS])}"]
        )
    return full


def _known_number(y: str | None, x: str, runs: Sequence[Finished]) -> str:
    known = list(dict.fromkeys(key for run in runs for row in run.numbers_at(x).values() for key in row))
    where = "the end of an epoch" if x == EPOCH else "the summary of a run"
    if not y:
        raise ConfigError([f"--y= names no number: {where} has {', '.join(known)}"])
    if y not in known:
        raise ConfigError([f"--y={y}: {where} has no such number; it has {', '.join(known)}{nearest(y, known)}"])
    return y


def _has(run: Finished, x: str, y: str) -> bool:
    return any(y in row for row in run.numbers_at(x).values())


def _differing(runs: Sequence[Finished]) -> list[str]:
    """Return the settings in which runs differ, those that choose a group first."""
    return _differing_keys([run.settings for run in runs])


def _differing_keys(found: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the same, given the settings of each run."""
    keys = [key for key in found[0] if len({each.get(key) for each in found}) > 1 and key != "run_dir"]
    return sorted(keys, key=lambda key: not key.endswith(".name"))  # stable


def _telling_apart(runs: Sequence[Finished], x: str, others: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the fewest settings, in order, that tell runs apart beside `x` and those that change no number.

    `others` are the settings of runs that have not finished.

    A setting that follows from those before it is left out: `optim=sgd,adamw` differ in many settings, one suffices.
    One that follows from `x` is left out only if the choice of `x` sets it: where each mode has rates of its own, a
    line over the rates is still of one mode.
    """
    chosen: list[str] = []
    found = [*(run.settings for run in runs), *others]
    for key in _differing_keys(found):
        if key in (x, *_may_differ(runs)):
            continue
        known = [x, *chosen] if _comes_with(key, x) else chosen
        before = {tuple(each.get(name) for name in known) for each in found}
        after = {tuple(each.get(name) for name in (*known, key)) for each in found}
        if len(after) > len(before):
            chosen.append(key)
    return chosen


def _may_differ(runs: Sequence[Finished]) -> frozenset[str]:
    """Return the settings in which averaged runs may differ; where the data lie only if all of them are the same."""
    names = {run.settings["dataset.name"] for run in runs}
    contents = {(run.settings["dataset.name"], run.summary.get("dataset/fingerprint")) for run in runs}
    return RUN_KEYS if len(contents) == len(names) else RUN_KEYS - {"dataset.root"}


def _comes_with(key: str, x: str) -> bool:
    """Return whether the choice of a group, such as `dataset.name`, sets a key beside."""
    group = x.removesuffix(".name")
    return f"{group}.name" == x and group in GROUPS and (key.startswith(f"{group}.") or key in _TAKEN_FROM.get(x, ()))


def _repeats(runs: Sequence[Finished], x: str, y: str, group: Sequence[str]) -> dict[str, str]:
    """Return the runs that repeat another, by name, and which: a seed counts once in a mean.

    Raises:
        ConfigError: runs of one point differ in more than the seed or in their data, or have one seed and other
            numbers.
    """
    first: dict[tuple[Value | None, ...], Finished] = {}
    once: dict[tuple[Value | None, ...], Finished] = {}
    repeats: dict[str, str] = {}
    for run in runs:
        point = run.settings.get(x), *(run.settings[key] for key in group)  # all epochs of a run are of one mean
        _refuse_mixture(first.setdefault(point, run), run, x, group)
        other = once.setdefault((*point, run.settings["seed"]), run)
        if other is not run:
            _refuse_other_numbers(other, run, x, y, group)
            repeats[run.name] = f"the same run as {other.name}"
    return repeats


def _refuse_other_numbers(one: Finished, other: Finished, x: str, y: str, group: Sequence[str]) -> None:
    ours, theirs = ([row.get(y) for row in run.numbers_at(x).values()] for run in (one, other))
    if repr(ours) != repr(theirs):  # as text, in which a NaN is one
        keys = _differing([one, other])  # a time may differ by them
        or_apart = f", or give --group={','.join([*group, keys[0]])}" if keys else ""
        raise ConfigError(
            [
                f"{one.name} and {other.name} are the same run, with seed={one.settings['seed']}, but differ in {y} "
                f"({ours[-1]} and {theirs[-1]}): {_MOVE}{or_apart}"
            ]
        )


def _points(runs: Sequence[Finished], x: str, y: str) -> dict[Value, Sample]:
    """Return the samples of a series by their place on the axis, in order."""
    values: dict[Value, list[float]] = {}
    for run in runs:
        for place, row in run.numbers_at(x).items():
            if y in row:
                values.setdefault(place, []).append(row[y])
    return {place: Sample.from_values(values[place]) for place in _in_order(values)}


def _refuse_mixture(one: Finished, other: Finished, x: str, group: Sequence[str]) -> None:
    differing = [key for key in _differing([one, other]) if key != x]
    if keys := [key for key in differing if key not in _may_differ([one, other])]:
        raise ConfigError(
            [
                f"{one.name} and {other.name} would be averaged, but differ in {', '.join(keys)}: "
                f"give --group={','.join([*group, keys[0]])}"
            ]
        )
    if "seed" in differing and one.settings["dataset.name"] == "synthetic":
        return  # its images are drawn from the seed
    if said := other_data(one.name, one.summary, other.name, other.summary):
        raise ConfigError([f"{said}: {_MOVE}"])


def _in_order(values: Iterable[Value]) -> list[Value]:
    """Return numbers in ascending order; if any value is text, all in their given order."""
    found = list(values)
    numbers = [value for value in found if not isinstance(value, str)]
    return [*sorted(numbers)] if len(numbers) == len(found) else found
