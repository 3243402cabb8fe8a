"""Which setting to use against delay: a paragraph that the measurements write."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from cdp_repro.report.delay_costs import Times
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing, best_of_each_mode, best_verdicts, corrected, untuned
from cdp_repro.report.tuning import loss_of, setting_of, tuned_rates
from cdp_repro.report.two_one_sided import BETTER, EQUIVALENT, LEVEL, NOT_SETTLED, WORSE
from cdp_repro.studies.study import Study

_OF_A_SETTING = ("mode=", "optim=", "optim.nesterov=", "optim.lr=", "delay", "accumulate=")
"""Beginnings of the overrides that readers take into runs of their own; the others belong to the study's network."""

_SENTENCES = {
    BETTER: "is more accurate than",
    EQUIVALENT: "is within {margin:g} {unit} of",  # it may be lower, but by less than that
    NOT_SETTLED: "is shown neither to be within {margin:g} {unit} of, nor to differ from,",
    WORSE: "is less accurate than",
}
"""By verdict, what readers may use first."""


def advice(
    standings: Sequence[Standing], tunings: Sequence[Study], groups: Mapping[str, Sequence[Group]], times: Times
) -> str:
    """Return the paragraph: the best verdict of each mode on fresh seeds; for networks without one, the best so far.

    So far means in the study that chooses or, before it has begun, of the tuning. Of the `tunings` of a network,
    the runs of full length count, if they have begun. `groups` are those of all studies by name.
    """
    judged = best_verdicts(standings)
    done = {network for network, _ in judged}
    said = [_judged(each, standings, times) for each in judged.values()]
    last = {study.network: study for study in sorted(tunings, key=_is_finals)}
    for network, study in last.items():
        if network not in done:
            choosing = [each for each in standings if each.study.chooses and each.study.network == network]
            best = [*best_of_each_mode(choosing).values()]
            so_far = _chosen(best) if best else _tuned(study, groups)
            said.append(f"{network} has no verdict on fresh seeds yet; {so_far}.")
    return " ".join(said) or "Not measured yet."


def _judged(each: Standing, standings: Sequence[Standing], times: Times) -> str:
    """Return a verdict with its evidence: several settings of a mode are several chances to pass."""
    rivals = [other for other in standings if other.verdict and other.study is each.study]
    tried = sum(other.group.mode == each.group.mode for other in rivals)
    verdict = _SENTENCES[each.verdict].format(margin=each.study.margin, unit=each.task.difference_unit)
    evidence = [f"{each.study.network}, fresh seeds: {each.difference}"]
    if each.verdict == EQUIVALENT:
        tested = corrected([other for other in standings if other.study is each.study])
        p, of_all = tested[each.group.cell]
        above = f", above {100 * LEVEL:g} %" if of_all >= LEVEL else ""
        more = f", corrected for {len(tested)} settings {of_all:.2g}{above}" if len(tested) > 1 else ""
        evidence.append(f"p = {p:.2g}{more}")
    if tried > 1:
        evidence.append(f"the best of {tried} settings")
    if time := times.get((each.group.config["dataset.name"], setting_of(each.group.config))):
        evidence.append(f"step time {time} of dp's")
    use, it = ("Use ", ": it") if each.verdict in (BETTER, EQUIVALENT) else ("", "")
    than = f"data parallelism with {each.optimizer} ({'; '.join(evidence)})"
    return f"{use}`{overrides(each.group)}`{it} {verdict} {than}."


def _chosen(best: Sequence[Standing]) -> str:
    """Say how the best of each mode stands on the seeds by which it was chosen, which flatter it."""
    told = [f"`{overrides(each.group)}` {each.difference}" for each in best]
    return (
        "so far, on the seeds that chose it (so it looks better than it is), the best of each mode minus data "
        f"parallelism with the same optimizer: {', '.join(told)}"
    )


def _is_finals(study: Study) -> bool:
    return study.kind == "delay-finals"


def _tuned(study: Study, groups: Mapping[str, Sequence[Group]]) -> str:
    """Say for each mode which setting has the lowest training loss so far, and whether its tuning has ended."""
    is_final = _is_finals(study)
    tuned = tuned_rates(study, groups) if is_final else {}
    best: dict[str, Group] = {}
    for group in sorted(groups[study.name], key=loss_of, reverse=True):
        best[group.mode] = group
    told = [
        f"`{overrides(group)}` {loss_of(group):.3f}"
        + (" (tuning goes on)" if is_final and untuned(group, tuned) else "")
        for group in sorted(best.values(), key=lambda group: group.mode != "dp")
    ]
    runs = "runs of full length" if is_final else "short runs, with which the tuning begins"
    return f"the lowest training loss of each mode so far in {runs}, one seed: {', '.join(told)}"


def overrides(group: Group) -> str:
    """Return the overrides of a group's command that do not belong to its network."""
    words = shlex.split(group.rows[0].command)
    return " ".join(word for word in words if word.startswith(_OF_A_SETTING))
