"""Whether each mode has a setting that is equivalent to data parallelism on every network; if not, what stands behind.

The reason is read off two things that were measured: how the gap in training loss grows with the learning rate, and how
the difference on fresh seeds goes with the share of reads that are stale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing, against_first_dp, best_verdicts
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import loss_of, method_of, optimizer_of
from cdp_repro.report.two_one_sided import (
    BETTER,
    EQUIVALENT,
    NOT_SETTLED,
    WORSE,
    equivalence,
    power_without_difference,
    seeds_for_power,
)  # fmt: skip
from cdp_repro.studies.study import Study

CLOSE = 0.01
"""A training loss is close to that of data parallelism if it exceeds it by at most this share."""
POWER = 0.8

Groups = Mapping[str, Sequence[Group]]
"""Groups of all studies by name."""


def goal(standings: Sequence[Standing], tunings: Sequence[Study], groups: Groups) -> list[str]:
    """Return, a paragraph for each mode, whether it has an equivalent setting on every network that fresh seeds judged.

    Where it has none, the paragraph says how far the best is from it. A last one has what the difference goes with.
    `tunings` are the studies of short runs that have begun.
    """
    best = best_verdicts(standings)
    networks = list(dict.fromkeys(network for network, _ in best))
    short = {study.network: study for study in tunings}
    said = []
    for mode in sorted({mode for _, mode in best}):
        found = {network: best.get((network, mode)) for network in networks}
        kept = [each for each in found.values() if each is not None and each.verdict in (EQUIVALENT, BETTER)]
        if len(kept) == len(networks):
            told = _listed([f"{each.study.network} ({method_of(each.group.config)})" for each in kept])
            said.append(f"`{mode}` has a setting that is equivalent to data parallelism on {told}.")
            continue
        lacking = {network: each for network, each in found.items() if each is None or each not in kept}
        text = [f"No setting of `{mode}` that was judged is equivalent to data parallelism on {_listed([*lacking])}."]
        for network, each in lacking.items():
            if each is not None:
                text += [_how_far(each), _against_first(each, groups)]
                text += [_gap(each, short[network], groups)] if network in short else []
        said.append(" ".join(filter(None, text)))
    by_share = _by_stale_share(standings)
    return [*said, " ".join([_WHOSE_READS, *by_share])] if by_share else said


_WHOSE_READS = (
    "All reads of `cdp_v1` are stale, whatever `accumulate` is; in `cdp_v2` the share of stale reads falls with it."
)


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
    needed = seeds_for_power(difference, margin, POWER)
    return (
        f"On {each.study.network} its best, {name}, is {NOT_SETTLED} ({each.difference}): {difference.n} seeds find it "
        f"equivalent with a probability of {power_without_difference(difference, margin):.2f} if there is no "
        f"difference; {needed} seeds would with {POWER:g}."
    )


def _against_first(each: Standing, groups: Groups) -> str:
    """Say how a setting compares with the data parallelism that has no better optimizer, where that is another."""
    found = against_first_dp(each.study, groups[each.study.name], each.group)
    if found is None or math.isnan(found.difference.low):
        return ""
    assert each.study.margin is not None
    first = method_of(found.reference.config)
    shown = equivalence(found.difference, each.study.margin, each.task.more_is_better)
    return (
        f"Compared with dp with {first} it is {shown.verdict} ({found.difference.text(each.task.digits)} "
        f"{each.task.difference_unit}), but that counts the gain of {each.optimizer} for the mode."
    )


def _gap(each: Standing, study: Study, groups: Groups) -> str:
    """Say up to which learning rate the training loss is close to that of data parallelism, in short runs."""
    ours, dp = (_losses(groups[study.name], mode, each) for mode in (each.group.mode, "dp"))
    shared = sorted(ours.keys() & dp.keys())
    close = [rate for rate in shared if ours[rate] <= (1 + CLOSE) * dp[rate]]
    lowest = min(shared, key=dp.__getitem__, default=None)
    if lowest is None or not math.isfinite(dp[lowest]):
        return ""
    gap = ours[lowest] - dp[lowest]
    then = f"it is {gap:.3f} nats higher" if math.isfinite(gap) else "it diverges"
    if not close:
        where = "at no learning rate"
    elif close == shared[: len(close)] and max(close) < lowest:
        above = dp[max(close)] - dp[lowest]
        where = (
            f"only up to the learning rate {max(close):g}, where dp's own is still {above:.2f} nats above its lowest,"
        )
    else:
        where = f"at the learning rates {', '.join(f'{rate:g}' for rate in close)}"
    return (
        f"In short runs its training loss is {where} within {100 * CLOSE:g} % of that of dp at the same rate; at "
        f"{lowest:g}, where dp's is lowest, {then}."
    )


def _losses(groups: Sequence[Group], mode: str, like: Standing) -> dict[float, float]:
    """Return the training loss by learning rate of a mode with the method of `like`, or of dp with its optimizer."""
    name = like.optimizer if mode == "dp" else method_of(like.group.config)
    return {
        group.config["optim.lr"]: loss_of(group)
        for group in groups
        if group.mode == mode and method_of(group.config) == name
    }


def _by_stale_share(standings: Sequence[Standing]) -> list[str]:
    """Say, for each network, how the differences of one method go with the share of stale reads."""
    alike: dict[tuple[str, str, str], list[Standing]] = {}
    for each in standings:
        if each.verdict and each.found is not None:
            method = method_of({**each.group.config, "accumulate": 1})
            alike.setdefault((each.study.name, each.study.network, method), []).append(each)
    said = []
    for (_, network, method), members in alike.items():
        ordered = sorted(members, key=lambda each: -stale_share(each.group))
        if len({stale_share(each.group) for each in ordered}) > 1:
            worse = [each.quality_lost for each in ordered]
            how = "falls with" if all(a > b for a, b in pairwise(worse)) else "does not simply follow"
            told = ", ".join(
                f"{each.found.difference.mean:+.{each.task.digits}f} at {100 * stale_share(each.group):.0f} % "
                f"({_mode_name(each.group)})"
                for each in ordered
                if each.found
            )
            said.append(f"On {network} with {method}, what is lost {how} that share: {told}.")
    return said


def _mode_name(group: Group) -> str:
    k = group.config["accumulate"]
    return group.mode + (f", accumulate {k}" if k > 1 else "")


def stale_share(group: Group) -> float:
    """Return the share, 0 to 1, of a group's reads of parameters that are not of the newest version."""
    delays = [delay for stages in group.rows[0].summary["staleness"] for delay in stages]
    return float(sum(delay > 0 for delay in delays) / len(delays))


def gap_table(study: Study, groups: Groups, standings: Sequence[Standing]) -> Table | None:
    """Return the training loss of each setting minus that of data parallelism at the same learning rate.

    It has the settings whose optimizers fresh seeds judged; None if there is none. `study` has the short runs.
    """
    judged = {each.optimizer for each in standings if each.verdict and each.study.network == study.network}
    own = [group for group in groups[study.name] if optimizer_of(group.config) in judged]
    if not own:
        return None
    rates = sorted({group.config["optim.lr"] for group in own})
    losses: dict[tuple[str, str], dict[float, float]] = {}
    shares: dict[tuple[str, str], float] = {}
    for group in own:
        key = group.mode, method_of(group.config)
        losses.setdefault(key, {})[group.config["optim.lr"]] = loss_of(group)
        shares.setdefault(key, stale_share(group))
    optimizers = {(group.mode, method_of(group.config)): optimizer_of(group.config) for group in own}
    rows = []
    for (mode, method), curve in losses.items():
        dp = losses.get(("dp", optimizers[mode, method]), {})
        gaps = [_gap_text(mode, curve.get(rate), dp.get(rate)) for rate in rates]
        rows.append([mode, method, f"{100 * shares[mode, method]:.0f}", *gaps])
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
