"""How a mode with a method stands to data parallelism: the difference on the same seeds, and when it is a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.config.task import Task, task_of
from cdp_repro.report.groups import Group, compared
from cdp_repro.report.tuning import TunedRate, method_of, setting_of, tuned_rates
from cdp_repro.report.two_one_sided import WORSE, Equivalence, equivalence
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.collecting import DIVERGED
from cdp_repro.studies.delay_studies import METHOD_KEYS
from cdp_repro.studies.study import Study


@dataclass(frozen=True)
class Standing:
    """A setting of a study beside data parallelism."""

    study: Study
    group: Group
    found: Equivalence | None
    """None if no seed has finished in both."""
    diverged: int
    """Of the setting's runs."""
    missing: str
    """What a verdict still needs; "" if there is one."""

    @property
    def verdict(self) -> str:
        """One of those of `two_one_sided`, "" if there is none. A setting that diverges on some seed is worse."""
        if self.missing:
            return ""
        return self.found.verdict if self.found and not self.diverged else WORSE

    @property
    def task(self) -> Task:
        """What is compared."""
        return task_of(self.group.config["dataset.name"])

    @property
    def difference(self) -> str:
        """The difference from data parallelism with its 95 % interval and the number of seeds, for people."""
        said = [] if self.found is None else [_difference_text(self.found, self.task.digits)]
        return ", ".join(said + ([f"{self.diverged} diverged"] if self.diverged else []))

    @property
    def text(self) -> str:
        """The verdict with its evidence."""
        return (
            f"{self.group.mode} with {method_of(self.group.config)} {self.verdict} "
            f"({self.difference} {self.task.difference_unit})"
        )


def _difference_text(found: Equivalence, digits: int) -> str:
    low, mean, high = (
        f"{round(each, digits) + 0.0:+.{digits}f}"  # + 0.0: no minus before a zero
        for each in (found.difference.low, found.difference.mean, found.difference.high)
    )
    interval = "" if math.isnan(found.difference.low) else f" [{low}, {high}]"
    return f"{mean}{interval} ({found.difference.n})"


def standings(study: Study, groups: Mapping[str, Sequence[Group]]) -> list[Standing]:
    """Return how each setting of a study stands to the data parallelism in it; nothing without that.

    `groups` are those of all studies by name. A setting is compared with data parallelism that has the same optimizer,
    or else with the first.

    Raises:
        RowError: two of them differ in more than the mode, the learning rate and the method.
    """
    own = groups[study.name]
    finals = STUDIES.get(study.tuning or "")
    tuned = tuned_rates(finals, groups) if finals is not None else {}
    found = []
    for group in own:
        reference = data_parallel_for(own, group)
        if reference is not None and group.mode != "dp":
            found.append(_standing(study, group, reference, tuned))
    return found


def data_parallel_for(groups: Sequence[Group], group: Group) -> Group | None:
    """Return the data parallelism that a group is compared with: of the same optimizer, or else the first."""
    fresh = [each for each in groups if each.mode == "dp"]
    alike = [each for each in fresh if each.config["optim.name"] == group.config["optim.name"]]
    return next(iter(alike or fresh), None)


def _standing(study: Study, group: Group, reference: Group, tuned: Mapping[tuple[str, ...], TunedRate]) -> Standing:
    task = task_of(group.config["dataset.name"])
    finished = Group(tuple(row for row in group.rows if DIVERGED not in row.summary) or group.rows)
    diverged = sum(DIVERGED in row.summary for row in group.rows)
    found = None
    if diverged < len(group.rows) and not _diverged(reference):
        compared(finished, reference, task.metric, METHOD_KEYS)  # refuses what must not be compared
        found = equivalence(
            dict(zip(finished.seeds, finished.values(task.metric), strict=True)),
            dict(zip(reference.seeds, reference.values(task.metric), strict=True)),
            study.margin or 0.0,
            task.more_is_better,
        )
    return Standing(study, group, found, diverged, _missing(study, group, reference, tuned))


def _diverged(group: Group) -> bool:
    return any(DIVERGED in row.summary for row in group.rows)


def _missing(study: Study, group: Group, reference: Group, tuned: Mapping[tuple[str, ...], TunedRate]) -> str:
    """Return what a verdict needs that is not there: a margin, tuned rates on both sides, all runs, one code."""
    if study.margin is None:
        return "the study states no margin"
    for name, each in (("", group), ("dp: ", reference)):
        if fault := untuned(each, tuned):
            return f"{name}{fault}"
        planned = {seed for cell in study.cells if cell.hash == each.rows[0].cell for seed in cell.seeds}
        if set(each.seeds) != planned:
            return f"{name}{len(each.seeds)} of {len(planned)} runs"
    if _diverged(reference):
        return "dp diverged"
    for name in ("version/code", "dataset/fingerprint"):
        if group.rows[0].summary[name] != reference.rows[0].summary[name]:
            return f"its {name} is another than that of dp"
    return ""


def untuned(group: Group, tuned: Mapping[tuple[str, ...], TunedRate]) -> str:
    """Return in words why a group's learning rate is not the one that the tuning chose; "" if it is."""
    end = tuned.get(setting_of(group.config), TunedRate(None, "not tuned"))
    if end.rate is None or end.rate == group.config["optim.lr"]:
        return end.missing
    return f"the tuning chose {end.rate:g}"


def best_of_each_mode(found: Sequence[Standing]) -> dict[str, Standing]:
    """Return, by mode, the setting whose mean is best, and which never diverged: what is judged on fresh seeds."""
    best: dict[str, Standing] = {}
    for each in (each for each in found if each.found is not None and not each.diverged):
        sign = 1 if each.task.more_is_better else -1
        mean = sign * each.group.sample(each.task.metric).mean
        if each.group.mode not in best or mean > sign * best[each.group.mode].group.sample(each.task.metric).mean:
            best[each.group.mode] = each
    return best
