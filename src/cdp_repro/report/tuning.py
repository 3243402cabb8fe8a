"""The learning rate at which each mode with each method is compared: chosen alike, by training loss, in two steps.

First come short runs at every rate of one grid. Then come runs as long as those that are compared: at the best rates
of the short runs, and at their neighbours in the grid until the lowest loss lies between two higher ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group
from cdp_repro.report.tables import Table
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.delay_studies import VARIED
from cdp_repro.studies.rows import DIVERGED, label_of_mode
from cdp_repro.studies.study import Study

LOSS = "train/loss"

Setting = tuple[str, ...]
"""Mode and values of `VARIED`, which identify a setting in every study."""


@dataclass(frozen=True)
class TunedRate:
    """The result of tuning a setting."""

    rate: float | None
    """None until the tuning has ended."""
    missing: str = ""
    """What the tuning still needs, in words."""


def setting_of(settings: Mapping[str, Any]) -> Setting:
    """Return the mode and the method of a run."""
    return label_of_mode(settings), *(str(settings[key]) for key in VARIED)


def setting_of_dp(settings: Mapping[str, Any]) -> Setting:
    """Return the data parallelism that a run is compared with: that of its optimizer."""
    return setting_of({**settings, "mode.name": "dp", "mode.staleness": None, "delay.name": "none", "accumulate": 1})


def method_of(settings: Mapping[str, Any]) -> str:
    """Return optimizer and method against delay for people: `sgd`, `sgd nesterov`, `adamw + prediction`."""
    nesterov = " nesterov" if settings["optim.nesterov"] else ""
    delay = "" if settings["delay.name"] == "none" else f" + {settings['delay.name']}"
    more = f", accumulate {settings['accumulate']}" if settings["accumulate"] > 1 else ""
    return f"{settings['optim.name']}{nesterov}{delay}{more}"


def optimizer_of(settings: Mapping[str, Any]) -> str:
    """Return the method of a run without what it does against delay: that of the data parallelism beside it."""
    return method_of({**settings, "delay.name": "none", "accumulate": 1})


def loss_of(group: Group) -> float:
    """Return the mean training loss of the last epoch, at the parameters that were read; infinite if a run diverged."""
    return math.inf if group.diverged else group.sample(LOSS).mean


def losses_by_rate(groups: Sequence[Group]) -> dict[Setting, dict[float, float]]:
    """Return the training loss by setting and learning rate."""
    found: dict[Setting, dict[float, float]] = {}
    for group in groups:
        found.setdefault(setting_of(group.config), {})[group.config["optim.lr"]] = loss_of(group)
    return found


def _grids(study: Study) -> dict[Setting, list[float]]:
    """Return the learning rates of each setting of a study, in order."""
    found: dict[Setting, set[float]] = {}
    for cell in study.cells:
        found.setdefault(setting_of(cell.settings), set()).add(cell.settings["optim.lr"])
    return {setting: sorted(rates) for setting, rates in found.items()}


def passed_on(groups: Sequence[Group], study: Study) -> dict[Setting, tuple[float, ...]]:
    """Return, for each setting whose short runs are complete, the learning rates with the lowest training losses.

    There are as many as the study passes on, best first; none if one of them lies at the edge of the grid, as a better
    one may lie beyond.
    """
    losses, found = losses_by_rate(groups), {}
    for setting, grid in _grids(study).items():
        by_rate = losses.get(setting, {})
        if by_rate.keys() >= set(grid):
            best = tuple(sorted(grid, key=by_rate.__getitem__)[: study.passes_on])
            found[setting] = () if {grid[0], grid[-1]} & set(best) else best
    return found


def tuned_rates(finals: Study, groups: Mapping[str, Sequence[Group]]) -> dict[Setting, TunedRate]:
    """Return how far the tuning of each setting has come. `finals` are the runs of full length.

    `groups` are those of all studies by name.
    """
    short = STUDIES[finals.tuning or ""]
    chosen, losses = passed_on(groups.get(short.name, ()), short), losses_by_rate(groups.get(finals.name, ()))
    return {
        setting: _tuned(grid, chosen.get(setting), losses.get(setting, {})) for setting, grid in _grids(short).items()
    }


def _tuned(grid: Sequence[float], chosen: Sequence[float] | None, losses: Mapping[float, float]) -> TunedRate:
    """Return the rate of a setting whose short runs chose `chosen` of `grid`; `losses` are those of full length."""
    if not chosen:
        why = "the short runs are not complete" if chosen is None else "at the edge of the grid: extend it"
        return TunedRate(None, why)
    if lacking := [f"{rate:g}" for rate in sorted(chosen) if rate not in losses]:
        return TunedRate(None, f"not run at full length: {', '.join(lacking)}")
    lowest = min(losses, key=losses.__getitem__)
    if math.isinf(losses[lowest]):
        return TunedRate(None, "all rates diverge at full length")
    neighbours = _neighbours(lowest, [*grid, *losses])
    if neighbours is None:
        return TunedRate(None, f"{lowest:g} is at the edge of the grid: extend it")
    if lacking := [f"{rate:g}" for rate in neighbours if rate not in losses]:
        return TunedRate(None, f"{lowest:g} is lowest so far; not run at full length: {', '.join(lacking)}")
    return TunedRate(lowest)


def _neighbours(rate: float, rates: Iterable[float]) -> tuple[float, float] | None:
    """Return the next lower and the next higher of some rates; None if there is no lower or no higher one."""
    lower, higher = max((r for r in rates if r < rate), default=None), min((r for r in rates if r > rate), default=None)
    return None if lower is None or higher is None else (lower, higher)


def rate_table(study: Study, groups: Mapping[str, Sequence[Group]]) -> Table:
    """Return training losses, a row per setting and a column per learning rate, and what is chosen.

    `study` is a tuning, or its finals.
    """
    own = groups[study.name]
    grids, losses = _grids(study), losses_by_rate(own)
    rates = sorted({rate for grid in grids.values() for rate in grid})
    methods = {setting_of(cell.settings): method_of(cell.settings) for cell in study.cells}
    said = _ends_of_finals(study, groups) if study.kind == "delay-finals" else _ends_of_short_runs(study, own)
    rows = [
        [setting[0], methods[setting],
         *(_loss_text(losses.get(setting, {}).get(rate), is_planned=rate in grid) for rate in rates),
         said.get(setting, "")]
        for setting, grid in grids.items()
    ]  # fmt: skip
    evidence = provenance([row for group in own for row in group.rows])
    columns = ("mode", "method", *(f"lr {rate:g}" for rate in rates), "chosen")
    return Table(study.name.replace("-", "_"), study.title, columns, rows, [_rule_of_choice(study)], evidence)


def _loss_text(loss: float | None, is_planned: bool) -> str:
    if loss is None:
        return "not run" if is_planned else ""
    return f"{loss:.4f}" if math.isfinite(loss) else DIVERGED


def _ends_of_short_runs(study: Study, groups: Sequence[Group]) -> dict[Setting, str]:
    return {
        setting: ", ".join(f"{rate:g}" for rate in sorted(rates)) or "at the edge: extend the grid"
        for setting, rates in passed_on(groups, study).items()
    }


def _ends_of_finals(study: Study, groups: Mapping[str, Sequence[Group]]) -> dict[Setting, str]:
    return {
        setting: end.missing if end.rate is None else f"{end.rate:g}"
        for setting, end in tuned_rates(study, groups).items()
    }


_LOSS_SHOWN = "Mean training loss of the last epoch, at the parameters that were read, of"


def _rule_of_choice(study: Study) -> str:
    once = (
        f"There is one run of each on seed {study.cells[0].seeds[0]}, which no comparison uses: rates whose losses "
        "differ by less than seeds do are not told apart. The test set has no say: the rate of the lowest training "
        "loss need not be that of the best result on it. Rates of one setting may be of several versions of the code: "
        f"the commits are below. What is missing: `python scripts/accuracy.py {study.name}`"
    )
    if study.kind == "delay-finals":
        return (
            f"{_LOSS_SHOWN} runs of full length: of each setting the best rates of its short runs, and their "
            "neighbours in the grid until the lowest loss lies between two that are higher. That rate is chosen. "
            f"{once}"
        )
    return (
        f"{_LOSS_SHOWN} short runs. The {study.passes_on} lowest of each setting go on to runs of full length. "
        f"All settings have the same learning rates. {once}"
    )
