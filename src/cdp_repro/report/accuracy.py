"""The accuracy table: data set, model and mode against data parallelism, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cdp_repro.config.errors import nearest
from cdp_repro.config.task import IMAGES, Task, task_of
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import OF_TWO_VERSIONS, Difference, Group, Sample, compared, data_parallel
from cdp_repro.report.tables import Table
from cdp_repro.schedule import MODES
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.rows import Row, RowError, label_of_mode
from cdp_repro.studies.study import Cell, Study

PAPER_VALUES = "paper_values.yaml"


@dataclass(frozen=True)
class Comparison:
    """A group and its difference from data parallelism on the same seeds; None for that itself, or if there is none."""

    study: str
    group: Group
    difference: Difference | None
    is_at_rate_of_dp: bool = True
    """Whether both have the same learning rate."""

    @property
    def task(self) -> Task:
        """What is compared."""
        return task_of(self.group.config["dataset.name"])


def comparisons(groups: Mapping[str, Sequence[Group]]) -> list[Comparison]:
    """Return every group of the accuracy studies, by study; those of other kinds are left out.

    Raises:
        RowError: a group and its data parallelism differ in more than the mode and the learning rate.
    """
    found = []
    for name, members in groups.items():
        study = STUDIES.get(name)
        if study is not None and study.kind != "accuracy":
            continue
        others = groups.get(study.reference, ()) if study and study.reference else ()
        for group in members:
            reference = data_parallel([*members, *others], group)
            found.append(_comparison(name, group, reference))
    return found


def _comparison(study: str, group: Group, reference: Group | None) -> Comparison:
    if reference is None or reference is group:
        return Comparison(study, group, None)
    difference = compared(group, reference, task_of(group.config["dataset.name"]).metric)
    return Comparison(study, group, difference, group.config["optim.lr"] == reference.config["optim.lr"])


def accuracy_table(found: Sequence[Comparison], paper: Mapping[str, float]) -> Table:
    """Return the table; a cell of the studies that has no run yet has a row with the command that fills it."""
    rows = [_row(each, paper) for each in found]
    tasks = dict.fromkeys(each.task for each in found) or {IMAGES: None}
    columns = (
        "study", "model", "mode", "lr", "epochs", " or ".join(task.label for task in tasks),
        f"minus dp [{' or '.join(task.difference_unit for task in tasks)}], 95 % interval", "p", "train loss",
        "seconds per epoch", "paper [%]",
    )  # fmt: skip
    present = {(each.study, each.group.cell) for each in found}
    for study in STUDIES.values():
        if study.kind == "accuracy":
            rows += [_missing(study, cell, len(columns)) for cell in study.cells
                     if (study.name, cell.hash) not in present]  # fmt: skip
    notes = [
        "Mean ± standard deviation over seeds, number of runs in brackets; differences are paired by seed, p is of the "
        "two-sided paired t-test. Seconds per epoch are of one thread on a machine that did other work, too: compare "
        "them with care.",
        OF_TWO_VERSIONS,
        f"The column `paper` is read from results/{PAPER_VALUES}, which says how to fill it.",
    ]
    evidence = [note for study, runs in _by_study(found).items() for note in provenance(runs, study)]
    return Table("accuracy", "Accuracy of each mode against data parallelism", columns, rows, notes, evidence)


def chosen_rate(groups: Sequence[Group]) -> float | None:
    """Return the smallest learning rate whose training loss is within 1 % of the lowest; None if no loss is finite.

    The test set has no say.
    """
    losses: dict[float, float] = {group.config["optim.lr"]: group.sample("train/loss").mean for group in groups}
    lowest = min(filter(math.isfinite, losses.values()), default=math.nan)
    return min((rate for rate, loss in losses.items() if loss <= 1.01 * lowest), default=None)


def _chosen_here(group: Group, chosen: float | None, same: Sequence[Group]) -> list[str]:
    """Return whether a learning rate is chosen, and whether it has the lowest loss at the edge of those of its mode.

    `same` are the groups of its mode, none if runs are missing.
    """
    rate, rates = group.config["optim.lr"], sorted(each.config["optim.lr"] for each in same)
    lowest = min(same, key=lambda each: each.sample("train/loss").mean, default=None)
    is_at_edge = lowest is group and rate in (rates[0], rates[-1])
    return [*(["yes"] if rate == chosen else []), *(["lowest, at the edge"] if is_at_edge else [])]


def tuning_table(groups: Sequence[Group], study: Study) -> Table:
    """Return the training loss by mode and learning rate, from which the learning rates of the studies are chosen."""
    present = {row.cell for group in groups for row in group.rows}
    missing = [cell for cell in study.cells if cell.hash not in present]
    unfinished = {label_of_mode(cell.settings) for cell in missing}
    members = [[group for group in groups if group.mode == mode] for mode in {g.mode for g in groups} - unfinished]
    of_mode = {same[0].mode: same for same in members}
    chosen = {mode: chosen_rate(same) for mode, same in of_mode.items()}
    rows = [
        [group.config["model.name"], group.mode, f"{group.config['optim.lr']:g}", str(group.config["epochs"]),
         group.sample("train/loss").text(4), group.sample(IMAGES.metric).text(),
         ", ".join(_chosen_here(group, chosen.get(group.mode), of_mode.get(group.mode, ())))]
        for group in sorted(groups, key=lambda group: (group.mode, group.config["optim.lr"]))
    ]  # fmt: skip
    rows += [
        [cell.settings["model.name"], label_of_mode(cell.settings), f"{cell.settings['optim.lr']:g}",
         str(cell.settings["epochs"]), not_run(cell), "", ""]
        for cell in missing
    ]  # fmt: skip
    notes = [
        "Chosen is the smallest learning rate whose training loss (mean of the last epoch) is within 1 % of the "
        "lowest; the test set has no say. The paper's modes all run with that of data parallelism. A lowest loss at "
        "the edge of its rates is marked: a better rate may lie beyond. The seed is also one of those compared. The "
        "studies of delay choose rates anew: by runs of full length, from the same rates, on a seed of their own."
    ]
    evidence = provenance([row for group in groups for row in group.rows])
    columns = ("model", "mode", "lr", "epochs", "train loss", "test top-1 [%]", "chosen")
    return Table("tuning", "The choice of the learning rates", columns, rows, notes, evidence)


def _by_study(found: Sequence[Comparison]) -> dict[str, list[Row]]:
    by_study: dict[str, list[Row]] = {}
    for each in found:
        by_study.setdefault(each.study, []).extend(each.group.rows)
    return by_study


def _row(each: Comparison, paper: Mapping[str, float]) -> list[str]:
    group, config = each.group, each.group.config
    value = paper.get(f"{config['dataset.name']}/{config['model.name']}/{group.mode}")
    return [
        each.study,
        config["model.name"],
        group.mode,
        f"{config['optim.lr']:g}",
        str(config["epochs"]),
        group.sample(each.task.metric).text(each.task.digits),
        each.difference.text(each.task.digits) if each.difference else "",
        _p_text(each.difference),
        group.sample("train/loss").text(4),
        Sample.from_values([_epoch_seconds(row.summary, config) for row in group.rows]).text(1),
        "" if value is None else f"{value:g}",
    ]


def _epoch_seconds(summary: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    steps_per_epoch: float = summary["step"] / config["epochs"]
    return steps_per_epoch * float(summary.get("time/step_seconds_median", math.nan))


def _p_text(difference: Difference | None) -> str:
    if difference is None or math.isnan(difference.p_value):
        return ""
    return "< 0.001" if difference.p_value < 0.001 else f"{difference.p_value:.3f}"


def _missing(study: Study, cell: Cell, columns: int) -> list[str]:
    settings = cell.settings
    said = [study.name, settings["model.name"], label_of_mode(settings), f"{settings['optim.lr']:g}",
            str(settings["epochs"]), not_run(cell)]  # fmt: skip
    return said + [""] * (columns - len(said))


def not_run(cell: Cell) -> str:
    """Return the text of a table in place of a missing run: the command of its first seed."""
    return f"not run: `{cell.command(cell.seeds[0])}`"


def read_paper_values(path: Path) -> dict[str, float]:
    """Return the paper's numbers by `dataset/model/mode`; none if there is no file.

    Raises:
        RowError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RowError(f"{path} cannot be read: {error}") from error
    wrong = not isinstance(found, dict) or [
        key for key, value in found.items() if not isinstance(value, int | float) or str(key).count("/") != 2
    ]
    if wrong:
        raise RowError(f"{path}: every line must be `dataset/model/mode: number`, as in cifar10/resnet18/dp: 12.3")
    for key in found:
        _, _, mode = key.split("/")
        if mode not in MODES:
            raise RowError(f"{path}: {key}: there is no mode {mode!r}{nearest(mode, MODES)}")
    return {str(key): float(value) for key, value in found.items()}
