"""What delay costs: each mode with each method against data parallelism, at learning rates that are tuned alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdp_repro.config.task import task_of
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group, compared
from cdp_repro.report.tables import Table
from cdp_repro.report.two_one_sided import Equivalence, equivalence
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.collecting import DIVERGED
from cdp_repro.studies.delay_studies import METHOD_KEYS, VARIED
from cdp_repro.studies.rows import label_of_mode
from cdp_repro.studies.study import Study

_LOSS = "train/loss"
_AT_EDGE = "at the edge: extend the grid"

Setting = tuple[str, ...]
"""Mode and values of `VARIED`, by which a setting is found again in another study."""


def setting_of(settings: Mapping[str, Any]) -> Setting:
    """Return the mode and the method of a run."""
    return label_of_mode(settings), *(str(settings[key]) for key in VARIED)


def method_of(settings: Mapping[str, Any]) -> str:
    """Return optimizer and method against delay for people: `sgd`, `sgd nesterov`, `adamw + prediction`."""
    nesterov = " nesterov" if settings["optim.nesterov"] else ""
    delay = "" if settings["delay.name"] == "none" else f" + {settings['delay.name']}"
    more = f", accumulate {settings['accumulate']}" if settings["accumulate"] > 1 else ""
    return f"{settings['optim.name']}{nesterov}{delay}{more}"


def best_rates(groups: Sequence[Group], study: Study) -> dict[Setting, tuple[float, ...]]:
    """Return, for each setting that a tuning has run at all its learning rates, those with the lowest training loss.

    As many as the tuning passes on, best first. None of them if one lies at the edge of the grid, as a better one may
    lie beyond.
    """
    losses = _losses(groups)
    grids: dict[Setting, set[float]] = {}
    for cell in study.cells:
        grids.setdefault(setting_of(cell.settings), set()).add(cell.settings["optim.lr"])
    complete = {setting: losses[setting] for setting, grid in grids.items() if losses.get(setting, {}).keys() >= grid}
    found = {setting: _lowest(by_rate, study.passes_on) for setting, by_rate in complete.items()}
    return {setting: () if _is_at_edge(study, rates, grids[setting]) else rates for setting, rates in found.items()}


def _is_at_edge(study: Study, rates: Sequence[float], grid: set[float]) -> bool:
    """Return whether a better rate may lie beyond the grid; the finals have no grid, only the best of one."""
    return study.kind == "delay-tuning" and not {min(grid), max(grid)}.isdisjoint(rates)


def _losses(groups: Sequence[Group]) -> dict[Setting, dict[float, float]]:
    """Return the training loss by setting and learning rate."""
    found: dict[Setting, dict[float, float]] = {}
    for group in groups:
        found.setdefault(setting_of(group.config), {})[group.config["optim.lr"]] = loss_of(group)
    return found


def loss_of(group: Group) -> float:
    """Return the mean training loss at the end; infinite if a run has diverged."""
    return math.inf if any(DIVERGED in row.summary for row in group.rows) else group.sample(_LOSS).mean


def _lowest(by_rate: Mapping[float, float], count: int) -> tuple[float, ...]:
    return tuple(sorted(sorted(by_rate), key=by_rate.__getitem__)[:count])


def delay_tuning_table(groups: Sequence[Group], study: Study) -> Table:
    """Return the training loss of each setting at each learning rate, and which of them the next study takes."""
    chosen, losses = best_rates(groups, study), _losses(groups)
    present = {row.cell for group in groups for row in group.rows}
    rows = []
    for group in sorted(groups, key=lambda group: (setting_of(group.config), group.config["optim.lr"])):
        setting, rate = setting_of(group.config), group.config["optim.lr"]
        is_best = setting in chosen and rate in _lowest(losses[setting], study.passes_on)
        said = "yes" if rate in chosen.get(setting, ()) else _AT_EDGE
        loss = group.sample(_LOSS).text(4) if math.isfinite(loss_of(group)) else DIVERGED
        rows.append([group.mode, method_of(group.config), f"{rate:g}", loss, said if is_best else ""])
    rows += [
        [label_of_mode(cell.settings), method_of(cell.settings), f"{cell.settings['optim.lr']:g}",
         f"not run: `{cell.command(cell.seeds[0])}`", ""]
        for cell in study.cells if cell.hash not in present
    ]  # fmt: skip
    evidence = provenance([row for group in groups for row in group.rows])
    columns = ("mode", "method", "lr", "train loss", "chosen")
    return Table(study.name.replace("-", "_"), study.title, columns, rows, [_rule_of_choice(study)], evidence)


def _rule_of_choice(study: Study) -> str:
    alike = f"one run of each, on seed {study.cells[0].seeds[0]}, which no other table uses"
    if study.kind == "delay-finals":
        return (
            "The lowest training loss wins; the test set has no say. Every setting has as many learning rates, the "
            f"best of its short runs, and {alike}."
        )
    return (
        f"The {study.passes_on} lowest training losses of each setting go on to runs of full length; the test set has "
        f"no say. Every setting has the same learning rates and {alike}; nothing is chosen before that."
    )


def against_data_parallelism(groups: Sequence[Group], group: Group, margin: float) -> Equivalence | None:
    """Return how a group of a study stands to the data parallelism in it, with the same optimizer if it has that.

    None for data parallelism itself, or without it.
    """
    fresh = [each for each in groups if each.mode == "dp"]
    alike = [each for each in fresh if each.config["optim.name"] == group.config["optim.name"]]
    reference = next(iter(alike or fresh), None)
    if reference is None or reference is group:
        return None
    task = task_of(group.config["dataset.name"])
    compared(group, reference, task.metric, METHOD_KEYS)  # refuses what must not be compared
    return equivalence(
        dict(zip(group.seeds, group.values(task.metric), strict=True)),
        dict(zip(reference.seeds, reference.values(task.metric), strict=True)),
        margin,
        task.more_is_better,
    )


def delay_table(groups: Sequence[Group], study: Study, tuning: Sequence[Group]) -> Table:
    """Return the difference of each setting from data parallelism, what it costs, and with a margin the verdict.

    `tuning` are the groups of the study that chose the learning rates.
    """
    task = task_of(study.cells[0].settings["dataset.name"])
    chosen = best_rates(tuning, STUDIES[study.tuning]) if study.tuning in STUDIES else {}
    rows = []
    for group in groups:
        found = against_data_parallelism(groups, group, study.margin or 0.0)
        is_tuned = chosen.get(setting_of(group.config)) == (group.config["optim.lr"],)
        rows.append(
            [
                group.mode,
                method_of(group.config),
                f"{group.config['optim.lr']:g}" + ("" if is_tuned else " (not the winner of the tuning)"),
                group.sample(task.metric).text(task.digits),
                _difference(found, task.digits),
                found.verdict if found and study.margin and is_tuned else "",
                f"{_bytes(group, 'optimizer'):.2f} + {_bytes(group, 'delay'):.2f}",
                group.sample("time/step_seconds_median").text(4),
            ]
        )
    present = {row.cell for group in groups for row in group.rows}
    rows += [
        [label_of_mode(cell.settings), method_of(cell.settings), f"{cell.settings['optim.lr']:g}",
         f"not run: `{cell.command(cell.seeds[0])}`", "", "", "", ""]
        for cell in study.cells if cell.hash not in present
    ]  # fmt: skip
    columns = (
        "mode", "method", "lr", task.label, f"minus dp [{task.difference_unit}], 95 % interval", "verdict",
        "optimizer + delay state [MiB]", "seconds a step",
    )  # fmt: skip
    notes, evidence = _notes(study, task.difference_unit), provenance([row for group in groups for row in group.rows])
    return Table(study.name.replace("-", "_"), study.title, columns, rows, notes, evidence)


def _notes(study: Study, unit: str) -> list[str]:
    rule = (
        "Verdict: equivalent if two one-sided tests at 5 % each show the difference to be less than "
        f"{study.margin:g} {unit}, the margin stated before the runs; else worse or better if the 95 % interval lies "
        "on one side of 0; else not settled. The seeds are fresh: no setting was chosen on them."
        if study.margin
        else "No verdict from here: the best settings are chosen in this table, and judged on fresh seeds."
    )
    return [
        "Mean ± standard deviation over seeds, number of runs in brackets; differences are paired by seed. State is of "
        "the device with most, beside parameters.",
        rule,
    ]


def _difference(found: Equivalence | None, digits: int) -> str:
    if found is None:
        return ""
    difference = found.difference
    interval = "" if math.isnan(difference.low) else f" [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"
    return f"{difference.mean:+.{digits}f}{interval} ({difference.n})"


def _bytes(group: Group, what: str) -> float:
    return float(group.rows[0].summary[f"memory/{what}_bytes_per_device"]) / 2**20


@dataclass(frozen=True)
class Verdict:
    """A setting of a study with a margin, against data parallelism on the same fresh seeds."""

    study: Study
    group: Group
    found: Equivalence

    @property
    def text(self) -> str:
        """The verdict with its evidence."""
        task = task_of(self.group.config["dataset.name"])
        return (
            f"{self.study.title}: {self.group.mode} with {method_of(self.group.config)} {self.found.verdict} "
            f"({_difference(self.found, task.digits)} {task.difference_unit})"
        )


def verdicts(groups: Mapping[str, Sequence[Group]]) -> list[Verdict]:
    """Return the verdicts of all studies that have a margin."""
    found = []
    for name, members in groups.items():
        study = STUDIES.get(name)
        if study is not None and study.margin:
            results = [(group, against_data_parallelism(members, group, study.margin)) for group in members]
            found += [Verdict(study, group, result) for group, result in results if result is not None]
    return found
