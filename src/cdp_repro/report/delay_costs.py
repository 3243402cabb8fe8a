"""What delay costs: each mode with each method against data parallelism, at learning rates that are tuned alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdp_repro.config.task import task_of
from cdp_repro.report.accuracy import not_run
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import OF_TWO_VERSIONS, Group, compared
from cdp_repro.report.standing import Standing, best_of_each_mode, rates_for, untuned
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import Setting, TunedRate, method_of, setting_of
from cdp_repro.report.two_one_sided import holm, power_without_difference
from cdp_repro.studies.delay_studies import METHOD_KEYS, OPTIMIZER_KEYS
from cdp_repro.studies.rows import DIVERGED, RowError, label_of_mode
from cdp_repro.studies.study import Cell, Study

METHOD_TIMES = Path("bench") / "methods.json"
"""File below the results with the measurements of `python scripts/bench.py methods`."""
_COPIES = "memory/predicted_parameter_bytes"
_TIME = (
    " Time: median and quartiles of alternating rounds (`python scripts/bench.py methods`), of the versions that "
    "results/bench/methods.json names."
)

Times = Mapping[tuple[str, Setting], str]
"""By data set and setting: the time of a step over that of data parallelism, as text."""


Columns = Mapping[str, Mapping[str, str]]
"""Columns of a table by their headings, each by cell."""


def read_times(results: Path) -> Times:
    """Return the step time of each setting over that of data parallelism, measured side by side; empty if not measured.

    Raises:
        RowError: the file is damaged.
    """
    path = results / METHOD_TIMES
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())["rows"]
        return {(row["dataset"], tuple(row["setting"])): _ratio_text(row["over_dp"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise RowError(f"{path} is damaged ({error!r}): restore it from git, or measure again") from error


def _ratio_text(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['quartile_low']:.2f} to {ratio['quartile_high']:.2f})"


def delay_table(study: Study, groups: Mapping[str, Sequence[Group]], found: Sequence[Standing], times: Times) -> Table:
    """Return the difference of each setting from data parallelism, and what it costs.

    `groups` are those of all studies by name, `found` says how those of this study stand.
    """
    task, own, tuned = task_of(study.cells[0].settings["dataset.name"]), groups[study.name], rates_for(study, groups)
    by_cell = {each.group.cell: each for each in found}
    more = {
        **_said(study, own, found, tuned, times),
        "parameters + optimizer + method [MiB]": {group.cell: _state(group) for group in own},
        **_from_plain(study, own),
    }
    rows = []
    for group in own:
        standing = by_cell.get(group.cell)
        rows.append(
            [
                group.mode,
                method_of(group.config),
                _rate(group, tuned),
                group.finished.sample(task.metric).text(task.digits) if group.finished else DIVERGED,
                (standing.difference or standing.missing) if standing else "",
                *(texts.get(group.cell, "") for texts in more.values()),
            ]
        )
    present = {group.cell for group in own}
    columns = ("mode", "method", "lr", task.label, f"minus dp [{task.difference_unit}], 95 % interval", *more)
    rows += [_missing(cell, len(columns)) for cell in study.cells if cell.hash not in present]
    evidence = provenance([row for group in own for row in group.rows])
    return Table(study.name.replace("-", "_"), study.title, columns, rows, _notes(study), evidence)


def _from_plain(study: Study, groups: Sequence[Group]) -> Columns:
    """Return the differences of groups with another optimizer from the first data parallelism.

    There is no column if data parallelism has only one optimizer, or if the first has no run or has diverged.
    """
    first, *others = (cell for cell in study.cells if label_of_mode(cell.settings) == "dp")
    plain = next((group for group in groups if group.cell == first.hash), None)
    if not others or plain is None or plain.diverged:
        return {}
    task = task_of(plain.config["dataset.name"])
    found = {}
    for group in groups:
        if group.finished is not None and any(group.config[key] != plain.config[key] for key in OPTIMIZER_KEYS):
            difference = compared(group.finished, plain, task.metric, METHOD_KEYS)
            found[group.cell] = difference.text(task.digits) if difference else ""
    return {f"minus dp with {method_of(plain.config)} [{task.difference_unit}]": found}


def _said(
    study: Study,
    groups: Sequence[Group],
    found: Sequence[Standing],
    tuned: Mapping[Setting, TunedRate],
    times: Times,
) -> Columns:
    """Return the verdicts or choices of a study that judges or chooses, and the step times on its data set."""
    if study.margin is not None:
        said = {
            "verdict": {each.group.cell: each.verdict or f"none yet: {each.missing}" for each in found},
            **_tests(study.margin, found),
        }
    elif study.chooses:
        said = {"goes on to fresh seeds": _chosen(study, groups, found, tuned)}
    else:
        return {}
    data = study.cells[0].settings["dataset.name"]
    return {**said, "step time over dp": {g.cell: times.get((data, setting_of(g.config)), "") for g in groups}}


def _tests(margin: float, found: Sequence[Standing]) -> Columns:
    """Return what the tests of equivalence give: p, p corrected for their number, and their power."""
    tested = {each.group.cell: each.found for each in found if each.found and not math.isnan(each.found.p_value)}
    p_values = [each.p_value for each in tested.values()]
    return {
        "p (corrected)": {
            cell: f"{p:.2g} ({corrected:.2g})"
            for cell, p, corrected in zip(tested, p_values, holm(p_values), strict=True)
        },
        "power": {cell: f"{power_without_difference(each.difference, margin):.2f}" for cell, each in tested.items()},
    }


def _chosen(
    study: Study, groups: Sequence[Group], found: Sequence[Standing], tuned: Mapping[Setting, TunedRate]
) -> dict[str, str]:
    """Return, for the best cell of each mode, whether it is chosen.

    It is chosen only when all runs of the mode have ended at the rates that the tuning chose, and each setting has its
    comparison.
    """
    seeds = {group.cell: {*group.seeds} for group in groups}
    open_modes = {
        label_of_mode(cell.settings) for cell in study.cells if not seeds.get(cell.hash, set()) >= {*cell.seeds}
    }
    for each in found:
        if untuned(each.group, tuned) or (each.found is None and not each.group.diverged):
            open_modes.add(each.group.mode)
    best = {mode: standing.group.cell for mode, standing in best_of_each_mode(found).items()}
    return {cell: "best so far" if mode in open_modes else "yes" for mode, cell in best.items()}


def _rate(group: Group, tuned: Mapping[Setting, TunedRate]) -> str:
    fault = untuned(group, tuned)
    return f"{group.config['optim.lr']:g}" + (f" ({fault})" if fault else "")


def _state(group: Group) -> str:
    """Return the MiB of parameters, optimizer and method on the device with most of each, as `0.60 + 0.30 + 0.30`.

    What the method keeps comes in two numbers if stale reads see copies; older rows do not count them.
    """
    summary: Mapping[str, Any] = (group.finished or group).rows[0].summary  # one that diverged may end untraced
    kinds = ["memory/parameter_peak_bytes", "memory/optimizer_bytes", "memory/delay_bytes"]
    if summary.get(f"{_COPIES}_per_device"):
        kinds.append(_COPIES)
    found = [summary.get(f"{kind}_per_device") for kind in kinds]
    if found[0] is not None:  # between two runs a device may hold more versions, for reads to come
        found[0] = max(found[0], summary["memory/parameter_bytes_per_device"])
    said = ["not measured" if nbytes is None else f"{nbytes / 2**20:.2f}" for nbytes in found]
    if group.config["delay.name"] == "prediction" and f"{_COPIES}_per_device" not in summary:
        said.append("copies not counted")
    return " + ".join(said)


def _missing(cell: Cell, columns: int) -> list[str]:
    settings = cell.settings
    said = [label_of_mode(settings), method_of(settings), f"{settings['optim.lr']:g}", not_run(cell)]
    return said + [""] * (columns - len(said))


def _notes(study: Study) -> list[str]:
    task = task_of(study.cells[0].settings["dataset.name"])
    better, best = ("higher", "highest") if task.more_is_better else ("lower", "lowest")
    if study.margin is not None:
        unit = task.difference_unit
        rule = (
            f"Equivalent: two one-sided tests at 5 % each show the difference to be less than {study.margin:g} {unit}, "
            "the margin stated before the runs (the 90 % interval lies within it; the 95 % one is shown). Else worse "
            "or better if the 95 % interval lies on one side of 0; else not settled. No verdict before both sides have "
            "all their runs at the rates that the tuning chose. The seeds are fresh: no setting was chosen on them. p "
            "is the larger of the two tests'; in brackets it is corrected for the number of settings in this table "
            "(Holm), which the verdict, of each setting for itself, is not. Power is the probability that as many "
            "seeds are found equivalent if there is no difference at all: where it is low, `not settled` says little."
        )
    elif study.chooses:
        rule = (
            f"This table only chooses: of each mode, the setting with the {best} mean goes on, "
            "and is judged on seeds that were not used before. Settings that had gone on before a better one was tried "
            "keep their verdicts."
        )
    else:
        rule = "No verdict: the seeds are few, and the learning rates are those that suit the smaller network."
    mixed = (
        "Accumulation cuts the same mini-batch into smaller micro-batches, over which BatchNorm takes its statistics: "
        "such a difference is not of the delay alone."
    )
    return [
        "Mean ± standard deviation over seeds, number of runs in brackets; differences are paired by seed, "
        f"{better} is better. Each setting is compared with dp of the same optimizer. What a device "
        "keeps, at most: all versions of the parameters, the optimizer's state, the method's (with prediction also the "
        "copies that stale reads see)." + (_TIME if study.margin is not None or study.chooses else ""),
        OF_TWO_VERSIONS,
        *([mixed] if any(_has_other_statistics(cell) for cell in study.cells) else []),
        rule,
        *(_tried_again(study) if study.margin is not None else []),
    ]


def _tried_again(study: Study) -> list[str]:
    """Return a sentence for each mode of which a study judges several settings; the last is the newest."""
    methods: dict[str, list[str]] = {}
    for cell in study.cells:
        if cell.settings["mode.name"] != "dp":
            methods.setdefault(label_of_mode(cell.settings), []).append(method_of(cell.settings))
    return [
        f"{mode} with {newest} was tried after {' and '.join(before)} had been judged, on the same seeds: each attempt "
        "is one more chance to seem equivalent."
        for mode, (*before, newest) in methods.items()
        if before
    ]


def _has_other_statistics(cell: Cell) -> bool:
    """Return whether a network with BatchNorm gets smaller micro-batches than the others."""
    return cell.settings["accumulate"] > 1 and str(cell.settings["model.name"]).startswith("resnet")
