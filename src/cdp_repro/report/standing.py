"""How a mode with a method compares with data parallelism: the difference on equal seeds, and when it is a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.config.task import Task, task_of
from cdp_repro.report.groups import Difference, Group, compared, data_parallel
from cdp_repro.report.tuning import Setting, TunedRate, method_of, optimizer_of, setting_of, tuned_rates
from cdp_repro.report.two_one_sided import (
    BETTER,
    EQUIVALENT,
    NOT_SETTLED,
    WORSE,
    Equivalence,
    equivalence,
    holm,
)  # fmt: skip
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.delay_studies import METHOD_KEYS, OPTIMIZER_KEYS
from cdp_repro.studies.rows import label_of_mode
from cdp_repro.studies.study import Study


@dataclass(frozen=True)
class Standing:
    """A setting of a study beside data parallelism."""

    study: Study
    group: Group
    found: Equivalence | None
    """None if no seed has finished in both."""
    missing: str
    """What a verdict still needs; "" if there is one."""

    @property
    def verdict(self) -> str:
        """A verdict of `two_one_sided`, "" if there is none. A setting that diverges on any seed is worse."""
        if self.missing:
            return ""
        return self.found.verdict if self.found and not self.group.diverged else WORSE

    @property
    def task(self) -> Task:
        """What is compared."""
        return task_of(self.group.config["dataset.name"])

    @property
    def difference(self) -> str:
        """The difference from data parallelism with its 95 % interval, number of seeds and unit, for people."""
        said = [f"{self.found.difference.text(self.task.digits)} {self.task.difference_unit}"] if self.found else []
        return ", ".join([*said, *([f"{self.group.diverged} diverged"] if self.group.diverged else [])])

    def quality(self, seeds: Collection[int]) -> float:
        """Return the mean of the deciding number over some of its seeds, with the sign by which higher is better."""
        values = zip(self.group.seeds, self.group.values(self.task.metric), strict=True)
        mean = statistics.fmean(value for seed, value in values if seed in seeds)
        return mean if self.task.more_is_better else -mean

    @property
    def loss_against_dp(self) -> float:
        """What data parallelism is better by, on average; negative if it is worse. NaN without a difference."""
        mean = self.found.difference.mean if self.found else math.nan
        return -mean if self.task.more_is_better else mean

    @property
    def optimizer(self) -> str:
        """The optimizer, which is also that of the data parallelism on the other side."""
        return optimizer_of(self.group.config)

    @property
    def text(self) -> str:
        """The verdict with its evidence."""
        return (
            f"{self.group.mode} with {method_of(self.group.config)} {self.verdict} "
            f"({self.difference}, minus dp with {self.optimizer})"
        )


def standings(study: Study, groups: Mapping[str, Sequence[Group]]) -> list[Standing]:
    """Return how each setting of a study compares with the study's data parallelism with the same optimizer.

    `groups` are those of all studies by name.

    Raises:
        RowError: two of them differ in more than the mode, the learning rate and the method.
    """
    own, tuned = groups[study.name], rates_for(study, groups)
    if study.margin is not None:  # a verdict is of the seeds that were planned, however many others have run
        own = [planned for group in own if (planned := _as_planned(study, group)) is not None]
    return [  # against data parallelism with another optimizer, the optimizer's gain would count as the mode's
        _standing(study, group, data_parallel(own, group, OPTIMIZER_KEYS), tuned) for group in own if group.mode != "dp"
    ]


def _as_planned(study: Study, group: Group) -> Group | None:
    """Return a group without the runs of seeds that its study does not plan; None if none is left."""
    seeds = _planned(study, group)
    rows = tuple(row for row in group.rows if row.seed in seeds)
    return Group(rows) if rows else None


def _planned(study: Study, group: Group) -> set[int]:
    return {seed for cell in study.cells if cell.hash == group.cell for seed in cell.seeds}


def rates_for(study: Study, groups: Mapping[str, Sequence[Group]]) -> dict[Setting, TunedRate]:
    """Return how far the tuning of each setting of a study has come; nothing if the study has none."""
    finals = STUDIES.get(study.tuning or "")
    return {} if finals is None else tuned_rates(finals, groups)


def _standing(study: Study, group: Group, reference: Group | None, tuned: Mapping[Setting, TunedRate]) -> Standing:
    if reference is None:
        return Standing(study, group, None, "no run of dp with its optimizer")
    task, finished, found = task_of(group.config["dataset.name"]), group.finished, None
    if finished is not None and not reference.diverged:
        difference = compared(finished, reference, task.metric, METHOD_KEYS)
        if difference is not None:
            found = equivalence(difference, study.margin or 0.0, task.more_is_better)
    return Standing(study, group, found, _missing(study, group, reference, tuned))


def _missing(study: Study, group: Group, reference: Group, tuned: Mapping[Setting, TunedRate]) -> str:
    """Return what a verdict still lacks: a margin, tuned rates on both sides, all runs, one code, or one device."""
    if study.margin is None:
        return "the study states no margin"
    for name, each in (("", group), ("dp: ", reference)):
        if fault := untuned(each, tuned):
            return f"{name}{fault}"
        planned = _planned(study, each)
        if set(each.seeds) != planned:
            return f"{name}{len(each.seeds)} of {len(planned)} runs"
    if reference.diverged:
        return "dp diverged"
    if group.rows[0].code != reference.rows[0].code:
        return "its code is another than that of dp"
    return "" if group.rows[0].device == reference.rows[0].device else "it ran on another device than dp"


def untuned(group: Group, tuned: Mapping[Setting, TunedRate]) -> str:
    """Return in words why a group's learning rate is not the one that the tuning chose; "" if it is."""
    end = tuned.get(setting_of(group.config), TunedRate(None, "not tuned"))
    if end.rate is None or end.rate == group.config["optim.lr"]:
        return end.missing
    return f"the tuning chose {end.rate:g}"


_BEST_FIRST = (BETTER, EQUIVALENT, NOT_SETTLED, WORSE)


def best_verdicts(found: Sequence[Standing]) -> dict[tuple[str, str], Standing]:
    """Return, by network and mode, the best judged setting, by its verdict and then its mean; better verdicts first."""

    def rank(each: Standing) -> tuple[int, int, float]:
        lost = each.loss_against_dp
        return _BEST_FIRST.index(each.verdict), each.group.diverged, math.inf if math.isnan(lost) else lost

    best: dict[tuple[str, str], Standing] = {}
    for each in (each for each in found if each.verdict):
        key = each.study.network, each.group.mode
        best[key] = min(best.get(key, each), each, key=rank)
    return dict(sorted(best.items(), key=lambda item: _BEST_FIRST.index(item[1].verdict)))


def corrected(found: Sequence[Standing]) -> dict[str, tuple[float, float]]:
    """Return, by cell, p of the tests of a study's settings, and p corrected for their number."""
    tested = {each.group.cell: each.found for each in found if each.found and not math.isnan(each.found.p_value)}
    p_values = [each.p_value for each in tested.values()]
    return dict(zip(tested, zip(p_values, holm(p_values), strict=True), strict=True))


@dataclass(frozen=True)
class VersusFirst:
    """A difference from the first data parallelism of a study."""

    reference: Group
    difference: Difference


def versus_first_dp(study: Study, groups: Sequence[Group], group: Group) -> VersusFirst | None:
    """Compare a group with the first data parallelism of its study, whose optimizer is another.

    None if it is the same, if there is no difference to tell, or if data parallelism has only one optimizer, or if the
    first has no run or has diverged. `groups` are those of the study.
    """
    first, *others = (cell for cell in study.cells if label_of_mode(cell.settings) == "dp")
    plain = next((each for each in groups if each.cell == first.hash), None)
    if not others or plain is None or plain.diverged or group.finished is None:
        return None
    if all(group.config[key] == plain.config[key] for key in OPTIMIZER_KEYS):
        return None
    task = task_of(plain.config["dataset.name"])
    difference = compared(group.finished, plain, task.metric, METHOD_KEYS)
    return VersusFirst(plain, difference) if difference else None


def best_of_each_mode(found: Sequence[Standing]) -> dict[str, Standing]:
    """Return, by mode, the setting with the best mean among those that never diverged: it is judged on fresh seeds.

    Means are over the seeds that all these settings of the mode share, as some seeds are easier than others.
    """
    by_mode: dict[str, list[Standing]] = {}
    for each in found:
        if each.found is not None and math.isfinite(each.found.difference.mean) and not each.group.diverged:
            by_mode.setdefault(each.group.mode, []).append(each)
    best = {mode: _best(settings) for mode, settings in by_mode.items()}
    return {mode: each for mode, each in best.items() if each is not None}


def _best(settings: Sequence[Standing]) -> Standing | None:
    shared = set.intersection(*({*each.group.seeds} for each in settings))
    return max(settings, key=lambda each: each.quality(shared)) if shared else None
