"""What delay costs: each mode with each method against data parallelism, at learning rates that are tuned alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdp_repro.config.task import task_of
from cdp_repro.predict.training_state import copied_bytes
from cdp_repro.report.accuracy import not_run
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import OF_TWO_VERSIONS, Group
from cdp_repro.report.standing import (
    Standing,
    best_of_each_mode,
    corrected,
    rates_for,
    untuned,
    versus_first_dp,
)  # fmt: skip
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import Setting, TunedRate, method_of, setting_of
from cdp_repro.report.two_one_sided import power_without_difference
from cdp_repro.schedule import Program, Schedule
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
    rows_of_own = (row for group in own for row in group.rows if "stages/costs" in row.summary)
    sizes = next((row.costs.parameter_bytes for row in rows_of_own), ())  # all have the same network and cut
    more = {
        **_said(study, own, found, tuned, times),
        "parameters + optimizer + method [MiB]": {group.cell: _state(group, sizes) for group in own},
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
    return Table(study.name.replace("-", "_"), study.title, columns, rows, _notes(study, _MARK in str(rows)), evidence)


def _from_plain(study: Study, groups: Sequence[Group]) -> Columns:
    """Return the differences of groups with another optimizer from the first data parallelism, if there are any."""
    found, references = {}, []
    for group in groups:
        if shown := versus_first_dp(study, groups, group):
            task = task_of(group.config["dataset.name"])
            found[group.cell] = shown.difference.text(task.digits)
            references.append(f"minus dp with {method_of(shown.reference.config)} [{task.difference_unit}]")
    return dict.fromkeys(references, found)


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
    return {
        "p (corrected)": {cell: f"{p:.2g} ({p_of_all:.2g})" for cell, (p, p_of_all) in corrected(found).items()},
        "power": {
            each.group.cell: f"{power_without_difference(each.found.difference, margin):.2f}"
            for each in found
            if each.found and not math.isnan(each.found.p_value)
        },
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


def _state(group: Group, sizes: Sequence[int]) -> str:
    """Return the MiB of parameters, optimizer and method on the device with most of each, as `0.60 + 0.30 + 0.30`.

    What the method keeps comes in two numbers if stale reads see copies. Numbers that older rows lack are simulated
    from the parameter bytes of each stage, `sizes`.
    """
    row = (group.finished or group).rows[0]  # one that diverged may end untraced
    kinds = ["memory/parameter_peak_bytes", "memory/optimizer_bytes", "memory/delay_bytes"]
    if row.summary.get(f"{_COPIES}_per_device", row.config["delay.name"] == "prediction"):
        kinds.append(_COPIES)
    found = [row.summary.get(f"{kind}_per_device") for kind in kinds]
    if found[0] is not None:  # between two runs a device may hold more versions, for reads to come
        found[0] = max(found[0], row.summary["memory/parameter_bytes_per_device"])
    simulated = _simulated(row.config, sizes) if None in found and sizes else {}
    return " + ".join(
        f"{nbytes / 2**20:.2f}" if nbytes is not None
        else f"{simulated[kind] / 2**20:.2f}{_MARK}" if kind in simulated else "not measured"
        for kind, nbytes in zip(kinds, found, strict=True)
    )  # fmt: skip


_MARK = "*"
"""Marks a simulated number."""


def _simulated(config: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, int]:
    """Return what can be told of the state of a run on one device from its schedule and the sizes of its stages.

    All parameters of the studied networks are trained. Only SGD's state is one value a parameter throughout.
    """
    if config["optim.name"] != "sgd" or config["placement.name"] != "single_device":
        return {}
    found = {"memory/optimizer_bytes": sum(sizes) * (config["optim.momentum"] > 0)}
    if config["delay.name"] == "none":
        found["memory/delay_bytes"] = 0
    if config["delay.name"] == "prediction":
        k = config["accumulate"]
        schedule = Schedule.build(config["mode.name"], config["workers"], len(sizes), accumulate=k)
        found[_COPIES] = copied_bytes(Program(schedule), sizes)
    return found


def _missing(cell: Cell, columns: int) -> list[str]:
    settings = cell.settings
    said = [label_of_mode(settings), method_of(settings), f"{settings['optim.lr']:g}", not_run(cell)]
    return said + [""] * (columns - len(said))


def _notes(study: Study, shows_simulated: bool = False) -> list[str]:
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
        "copies that stale reads see)."
        + (f" {_MARK} simulated, as rows of older versions lack it." if shows_simulated else "")
        + (_TIME if study.margin is not None or study.chooses else ""),
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
    return cell.settings["accumulate"] > 1 and has_batch_norm(cell.settings)


def has_batch_norm(settings: Mapping[str, Any]) -> bool:
    """Return whether the network of a run, among those that are studied, has BatchNorm."""
    return str(settings["model.name"]).startswith("resnet")
