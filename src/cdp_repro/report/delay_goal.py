"""Whether each mode has a setting that is equivalent to data parallelism on every network; if not, how far it is off.

Beside it stand two measurements that go with the difference: how much delay adds to the training loss at the same
learning rate, and which share of the reads is stale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cdp_repro.report.delay_costs import has_batch_norm
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing, best_verdicts, versus_first_dp
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import losses_by_rate, method_of, optimizer_of, setting_of, setting_of_dp
from cdp_repro.report.two_one_sided import (
    BETTER,
    EQUIVALENT,
    MOST_SEEDS,
    NOT_SETTLED,
    WORSE,
    equivalence,
    power_without_difference,
    seeds_for_power,
)  # fmt: skip
from cdp_repro.studies.study import Study

POWER = 0.8

Groups = Mapping[str, Sequence[Group]]
"""Groups of all studies by name."""


def goal_paragraphs(standings: Sequence[Standing], tunings: Sequence[Study], groups: Groups) -> list[str]:
    """Return, a paragraph for each mode, whether it has an equivalent setting on every network that fresh seeds judged.

    Where it has none, the paragraph says how far the best is from it. A last one has what the difference goes with.
    `tunings` are the studies of short runs that have begun.
    """
    best = best_verdicts(standings)
    networks = list(dict.fromkeys(network for network, _ in best))
    short = {study.network: study for study in tunings}
    said = []
    for mode in sorted({mode for _, mode in best}):
        found = {network: each for network in networks if (each := best.get((network, mode)))}
        kept = [each for each in found.values() if _is_kept(each)]
        lacking = [each for each in found.values() if not _is_kept(each)]
        text = []
        if kept:
            told = _listed([f"{each.study.network} ({method_of(each.group.config)})" for each in kept])
            text.append(f"`{mode}` has a setting that is equivalent to data parallelism, or better, on {told}.")
        if lacking:
            names = _listed([each.study.network for each in lacking])
            text.append(f"No setting of `{mode}` that was judged is equivalent to data parallelism on {names}.")
        for each in lacking:
            rivals = [other for (network, _), other in best.items() if network == each.study.network]
            text += [_how_far(each), _versus_first_dp(each, groups)]
            text += [_gaps(each, rivals, short[each.study.network], groups)] if each.study.network in short else []
        unjudged = [network for network in networks if network not in found]
        text += [f"On {_listed(unjudged)} it has not been judged on fresh seeds yet."] if unjudged else []
        said.append(" ".join(filter(None, text)))
    by_share = _by_stale_share(standings)
    return [*said, " ".join([_SHARE_RULE, *by_share])] if by_share else said


_SHARE_RULE = (
    "All reads of `cdp_v1` are stale, whatever `accumulate` is; in `cdp_v2` a larger `accumulate` makes a smaller "
    "share of reads stale."
)


def _is_kept(each: Standing) -> bool:
    return each.verdict in (EQUIVALENT, BETTER)


def _listed(names: Sequence[str]) -> str:
    return " and on ".join(names)


def _how_far(each: Standing) -> str:
    """Say how far the best setting of a mode is from equivalent."""
    assert each.study.margin is not None, "only judged settings are asked for"
    name, margin, found = method_of(each.group.config), each.study.margin, each.found
    if found is None or each.group.diverged:
        return f"On {each.study.network} its best, {name}, has diverged."
    difference = found.difference
    if each.verdict == WORSE:
        return (
            f"On {each.study.network} its best, {name}, is worse by {abs(difference.mean) / margin:.1f} times the "
            f"margin ({each.difference})."
        )
    said = f"On {each.study.network} its best, {name}, is {NOT_SETTLED} ({each.difference})"
    if math.isnan(difference.error):
        return f"{said}."
    needed = seeds_for_power(difference, margin, POWER)
    enough = f"{needed} seeds are needed" if needed < MOST_SEEDS else f"more than {MOST_SEEDS} seeds are needed"
    return (
        f"{said}: if there were no difference, {difference.n} seeds would show equivalence with a probability of "
        f"{power_without_difference(difference, margin):.2f}; {enough} for {POWER:g}."
    )


def _versus_first_dp(each: Standing, groups: Groups) -> str:
    """Say how a setting compares with the first data parallelism, where its optimizer is another."""
    found = versus_first_dp(each.study, groups[each.study.name], each.group)
    if found is None or math.isnan(found.difference.low):
        return ""
    assert each.study.margin is not None
    first = method_of(found.reference.config)
    shown = equivalence(found.difference, each.study.margin, each.task.more_is_better)
    return (
        f"Compared with dp with {first} it is {shown.verdict} ({found.difference.text(each.task.digits)} "
        f"{each.task.difference_unit}), but that counts the gain of {each.optimizer} for the mode."
    )


def _gaps(each: Standing, rivals: Sequence[Standing], study: Study, groups: Groups) -> str:
    """Say what delay adds to the training loss in short runs, at the rate that was judged; beside it the modes kept."""
    own = groups[study.name]
    gap = _gap(each, own)
    if gap is None:
        return ""
    others = [(other, theirs) for other in rivals if _is_kept(other) and (theirs := _gap(other, own)) is not None]
    beside = ", ".join(
        f"that of {other.group.mode} with {method_of(other.group.config)} by {theirs:+.3f}" for other, theirs in others
    )
    return (
        f"In short runs, of one seed, its training loss at the learning rate {each.group.config['optim.lr']:g} differs "
        f"from that of dp by {gap:+.3f} nats{f', {beside}' if beside else ''}."
    )


def _gap(each: Standing, groups: Sequence[Group]) -> float | None:
    """Return the training loss of a setting minus that of dp with its optimizer, at the rate that was judged."""
    config, losses = each.group.config, losses_by_rate(groups)
    settings = setting_of(config), setting_of_dp(config)
    ours, dp = (losses.get(setting, {}).get(config["optim.lr"], math.inf) for setting in settings)
    return ours - dp if math.isfinite(ours) and math.isfinite(dp) else None


def _by_stale_share(standings: Sequence[Standing]) -> list[str]:
    """Say, for each method on a network, how its differences go with the share of stale reads, if there are three.

    Where a study that judges has three, it counts, else one that chooses.
    """
    alike: dict[tuple[str, str, bool], list[Standing]] = {}
    for each in standings:
        if each.found is not None and (each.verdict or each.study.chooses):
            method = method_of({**each.group.config, "accumulate": 1})
            alike.setdefault((each.study.network, method, bool(each.verdict)), []).append(each)
    shown = {
        key: members for key, members in alike.items() if len({each.group.stale_share for each in members}) >= _FEWEST
    }
    return [
        _share_text(network, method, members)
        for (network, method, is_judged), members in shown.items()
        if is_judged or (network, method, True) not in shown
    ]


_FEWEST = 3
"""Fewer shares of stale reads show no tendency."""


def _share_text(network: str, method: str, members: Sequence[Standing]) -> str:
    ordered = sorted(members, key=lambda each: each.group.stale_share, reverse=True)
    lost = [each.loss_against_dp for each in ordered]
    shrinks = all(before > after for before, after in pairwise(lost))
    told = ", ".join(
        f"{each.found.difference.mean:+.{each.task.digits}f} at {100 * each.group.stale_share:.0f} % "
        f"({_mode_name(each.group)})"
        for each in ordered
        if each.found
    )
    other = (
        " There `accumulate` also gives BatchNorm smaller micro-batches."
        if has_batch_norm(ordered[0].group.config)
        else ""
    )
    return (
        f"On {network} with {method} the difference from dp {'shrinks with' if shrinks else 'does not simply follow'} "
        f"that share: {told}.{other}"
    )


def _mode_name(group: Group) -> str:
    k = group.config["accumulate"]
    return group.mode + (f", accumulate {k}" if k > 1 else "")


def gap_table(study: Study, groups: Groups, standings: Sequence[Standing]) -> Table | None:
    """Return the training loss of each setting minus that of data parallelism at the same learning rate.

    It has the settings whose optimizers fresh seeds judged; None if there is none. `study` has the short runs.
    """
    judged = {each.optimizer for each in standings if each.verdict and each.study.network == study.network}
    own = [group for group in groups[study.name] if optimizer_of(group.config) in judged]
    if not own:
        return None
    rates = sorted({group.config["optim.lr"] for group in own})
    losses = losses_by_rate(own)
    rows = []
    for setting, group in {setting_of(group.config): group for group in own}.items():
        curve, dp = losses[setting], losses.get(setting_of_dp(group.config), {})
        gaps = [_gap_text(group.mode, curve.get(rate), dp.get(rate)) for rate in rates]
        rows.append([group.mode, method_of(group.config), f"{100 * group.stale_share:.0f}", *gaps])
    note = (
        "Training loss of the last epoch, in nats: of dp its own, of others what is added to that of dp with the same "
        f"optimizer at the same learning rate; short runs, one seed ({study.cells[0].seeds[0]}). A dash: one of the "
        "two has diverged or has not run."
    )
    columns = ("mode", "method", "stale reads [%]", *(f"lr {rate:g}" for rate in rates))
    return Table(
        f"{study.name.removesuffix('-tuning').replace('-', '_')}_gaps",
        f"{study.network}: what delay adds to the training loss at each learning rate",
        columns, rows, [note], provenance([row for group in own for row in group.rows]),
    )  # fmt: skip


def _gap_text(mode: str, loss: float | None, of_dp: float | None) -> str:
    if loss is None or of_dp is None or not math.isfinite(loss) or not math.isfinite(of_dp):
        return "–"
    return f"{loss:.3f}" if mode == "dp" else f"{loss - of_dp:+.3f}"
