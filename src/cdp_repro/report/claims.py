"""The claims of the paper as a checklist: measurements decide the verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.memory_reduction import theory
from cdp_repro.predict.simulate import simulate
from cdp_repro.report.accuracy import Comparison
from cdp_repro.report.activation_memory import Case
from cdp_repro.report.cost_table import Line
from cdp_repro.report.groups import Group
from cdp_repro.report.standing import Standing
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import method_of
from cdp_repro.report.two_one_sided import BETTER, EQUIVALENT, NOT_SETTLED, WORSE
from cdp_repro.schedule import Program, Schedule
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.rows import Row

HOLDS, PARTLY, FAILS, UNKNOWN = "holds", "holds in part", "does not hold", "not measured yet"

_CLOSE = 1.05
"""Up to this factor a peak counts as that of equal stages, and bytes count as constant."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the verdict and its evidence."""

    number: int
    text: str
    verdict: str
    because: str
    brief: str = ""
    """The numbers that decide it, in a few words."""


def claims(
    memory: Sequence[Case],
    costs: Sequence[Line],
    accuracy: Sequence[Comparison],
    rows: Sequence[Row],
    standings: Sequence[Standing] = (),
) -> list[Claim]:
    """Return all claims, in the order of the paper."""
    return [
        _halved(memory),
        _balanced(costs),
        _accurate(accuracy, standings),
        _fewer_devices(costs),
        _point_to_point(costs),
        _bounded(rows),
    ]


def claim_table(found: Sequence[Claim]) -> Table:
    """Return the checklist."""
    rows = [[str(claim.number), claim.text, claim.verdict, claim.because] for claim in found]
    evidence = [
        "Judged by `cdp-report build` from the rows whose runs and commands stand below the tables that follow."
    ]
    return Table("claims", "The paper's claims", ("", "claim", "verdict", "what was measured"), rows, _RULES, evidence)


_RULES = (
    f"Claim 1 holds if memory is flat (no slot of the steady state more than {100 * (_CLOSE - 1):.0f} % above the "
    "mean) and, cut by FLOPs, the peak of every network is at most that much above the one of equal stages. It holds "
    "in part if some cut lowers the peak of every network, and memory is flat or the peak as low as with equal stages.",
    "Claims 2, 4 and 5 hold or do not hold: by the chain of 1 with every N, by the number of devices, and by the "
    "largest number of workers to which an owner sends at once.",
    "Claim 3 holds if both modes are equivalent to data parallelism, or better, on every network of CIFAR-10 and "
    "ImageNet that fresh seeds have judged, and in part if one mode is; a mode counts by its best setting. It does not "
    "hold if both are worse on all of them; else it is not settled. Claim 6 follows from the rules of the "
    "modes; that runs keep to them is checked at every read.",
)
"""What decides a verdict, for readers."""


def verdict_table(found: Sequence[Claim]) -> Table:
    """Return the checklist in brief."""
    rows = [[claim.text, claim.verdict, claim.brief] for claim in found]
    return Table("verdicts", "The paper's claims in brief", ("claim of the paper", "verdict", "measured"), rows)


def _halved(memory: Sequence[Case]) -> Claim:
    text = "Activation memory is constant over a step instead of peaked, and about half of data parallelism's"
    largest = max((case.workers for case in memory if case.partition == "flops"), default=0)
    by_cut = {
        cut: {case.model: case.ratios["paper"] for case in memory if case.workers == largest and case.partition == cut}
        for cut in ("flops", "activations")
    }
    if not by_cut["flops"]:
        return Claim(1, text, UNKNOWN, "")
    flat = max(_unevenness(case) for case in memory)
    verdict = memory_verdict(by_cut, theory(largest), flat)
    parts = [
        f"cut by {cut}: {', '.join(f'{model} {ratio:.3f}' for model, ratio in ratios.items())}"
        for cut, ratios in by_cut.items()
    ]
    first = {case.model: case.ratios["backward_first"] for case in memory
             if case.workers == largest and case.partition == "activations"}  # fmt: skip
    if first:
        parts.append(f"the same backward first: {', '.join(f'{model} {r:.3f}' for model, r in first.items())}")
    return Claim(
        1, text, verdict,
        f"Executed peak over data parallelism's with N = {largest} ({theory(largest):.3f} for equal stages): "
        f"{'; '.join(parts)}. In the steady state the highest slot is at most {_upper_percent(flat - 1)} % above the "
        "mean.",
        brief=_peaks(by_cut, largest),
    )  # fmt: skip


def memory_verdict(by_cut: Mapping[str, Mapping[str, float]], equal_stages: float, unevenness: float) -> str:
    """Judge peaks over data parallelism's, by cut and network.

    The claim holds if memory is flat and, cut by FLOPs, as low for all networks as with equal stages. It holds in part
    if some cut lowers the peak of all networks, and either memory is flat or that cut makes it so low; otherwise it
    fails.
    """
    is_flat = unevenness <= _CLOSE
    highest = {cut: max(ratios.values()) for cut, ratios in by_cut.items() if ratios}
    if is_flat and highest["flops"] <= _CLOSE * equal_stages:
        return HOLDS
    return PARTLY if min(highest.values()) < (1 if is_flat else _CLOSE * equal_stages) else FAILS


def _peaks(by_cut: Mapping[str, Mapping[str, float]], workers: int) -> str:
    """Return the range of peaks over data parallelism's for each cut, and what equal stages would give."""
    ranges = [
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} cut by {'FLOPs' if cut == 'flops' else cut}"
        for cut, ratios in by_cut.items()
        if ratios
    ]
    return f"peak with N = {workers} over DP's: {', '.join(ranges)}; {theory(workers):.2f} for equal stages"


def _unevenness(case: Case) -> float:
    """Return the highest slot over the mean, in the paper's order, when the pipeline is full."""
    stages = case.dp.rows[0].costs.stages
    full = case.cdp["paper"].rows[0].activation_bytes[2 * stages : 6 * stages]
    return max(full) / (sum(full) / len(full)) if full else math.nan


def _upper_percent(share: float) -> str:
    """Return a share in percent, rounded up to a tenth, as a bound must be."""
    return f"{math.ceil(round(1000 * share, 6)) / 10:.1f}" if math.isfinite(share) else str(share)


def _pair(costs: Sequence[Line], placement: str) -> tuple[Line, Line] | None:
    """Return the lines of DP and CDP-v2 for the largest N with which both ran, by ordered messages."""
    ran = {
        (line.setting.mode, line.workers): line
        for line in costs
        if line.setting.placement == placement
        and line.setting.baseline is None
        and not line.setting.collectives
        and line.executed
    }
    both = [n for mode, n in ran if mode == "dp" and ("cdp_v2", n) in ran]
    return (ran["dp", max(both)], ran["cdp_v2", max(both)]) if both else None


def _balanced(costs: Sequence[Line]) -> Claim:
    text = (
        "Gradients move point to point between time steps, in O(1) message steps, instead of an all-reduce at the end"
    )
    pair = _pair(costs, "replicated")
    if pair is None:
        return Claim(2, text, UNKNOWN, "")
    dp, cdp = pair
    n = cdp.workers
    grows = any(
        line.closed.get("chain") != 1 or line.executed.get("chain", 1) != 1
        for line in costs
        if line.setting.placement == "replicated" and line.setting.mode != "dp"
    )
    shares = {mode: _busiest_share(mode, n) for mode in ("dp", "cdp_v2")}
    return Claim(
        2, text, FAILS if grows else HOLDS,
        f"Replicated, N = {n}, executed: the longest chain of messages between two slots is {cdp.executed['chain']:g} "
        f"for cdp_v2 ({'not ' if grows else ''}1 with every N that ran), against {dp.executed['chain']:g} for our data "
        f"parallelism (a chain of 2(N-1); a tree needs O(log N)). Simulated with equal stages, the busiest slot "
        f"carries {100 * shares['cdp_v2']:.0f} % of a step's bytes, against {100 * shares['dp']:.0f} %. "
        f"{_volume(dp, cdp)}",
        brief=f"longest chain of messages of a slot: {cdp.executed['chain']:g}, against {dp.executed['chain']:g}",
    )  # fmt: skip


def _volume(dp: Line, cdp: Line) -> str:
    """Say how many bytes a device sends in a training step, on average and at most."""
    mean, most = (
        " against ".join(format_bytes(line.simulated[quantity]) for line in (cdp, dp))
        for quantity in ("sent_bytes_per_device", "most_sent_bytes")
    )
    return f"Bytes that a device sends in a training step: {mean} on average, {most} where they are most."


def _busiest_share(mode: str, workers: int) -> float:
    """Return the share of a step's gradient bytes that its busiest slot carries, with equal stages on `replicated`."""
    schedule = Schedule.build(mode, workers, placement="replicated")
    trace = simulate(Program(schedule), StageCosts.equal(workers), steps=5)
    step = schedule.slots_per_step
    sent = Counter(dict.fromkeys(range(3 * step, 4 * step), 0))
    for message in trace.messages:
        if message.slot in sent:
            sent[message.slot] += message.bytes
    return max(sent.values()) / sum(sent.values())


def _accurate(accuracy: Sequence[Comparison], standings: Sequence[Standing]) -> Claim:
    """Judge by tuned settings that have a verdict on fresh seeds; before there are any, by those at the rate of dp."""
    text = "Accuracy equals or betters data parallelism on CIFAR-10 and ImageNet, for CDP-v1 and CDP-v2"
    ours = [each for each in accuracy if each.group.mode in _CLAIMED_MODES and each.is_at_rate_of_dp
            and each.study in STUDIES and each.difference and each.difference.n > 1]  # fmt: skip
    judged = [each for each in standings if each.verdict and each.group.mode in _CLAIMED_MODES]
    if not ours and not judged:
        return Claim(3, text, UNKNOWN, "")
    claimed = [*filter(_is_claimed, ours)]
    verdict = _plain_verdict(claimed) if claimed else UNKNOWN
    brief = _briefly(claimed)
    because = []
    if ours:
        shown = "; ".join(f"{each.study} {each.group.config['model.name']} {each.group.mode}: "
                          f"{each.difference.text(each.task.digits)} {each.task.difference_unit}"
                          for each in ours if each.difference)  # fmt: skip
        because = [f"Without a method, at the learning rate of data parallelism: {verdict}. Difference from data "
                   f"parallelism, 95 % interval, number of seeds: {shown}."]  # fmt: skip
    decisive = [*filter(_is_claimed, judged)]
    if decisive:  # a verdict on a learning rate is not one on the method
        verdict = tuned_verdict(judged)
    if judged:
        shown = "; ".join(f"{each.study.network}: {each.text}" for each in judged)
        because = [f"With a learning rate and a method of its own, on fresh seeds: {shown}.", *because]
        told = [f"{each.group.mode} with {method_of(each.group.config)} {each.verdict}"
                for each in decisive]  # fmt: skip
        plainly = [f"without a method, at the rate of dp: {brief}"] if brief else []
        brief = "; ".join([*([f"tuned: {', '.join(told)}"] if told else []), *plainly])
    judged_on = [*(each.group for each in claimed), *(each.group for each in decisive)]
    runs = ", ".join(sorted({*map(_run_of, judged_on)})) or "nothing"
    lacking = [name for name in _CLAIMED_DATA if name not in {group.config["dataset.name"] for group in judged_on}]
    not_run = f"; not run: {', '.join(lacking)}" if lacking else ""
    note = (
        f"The claim names CIFAR-10 and ImageNet, and the authors' ResNets at full length. It is judged on: {runs}"
        f'{not_run}. An interval that contains 0 does not prove equality; only "equivalent" does, up to its margin.'
    )
    brief = f"{brief} ({runs}{not_run})" if brief else ""
    return Claim(3, text, verdict, " ".join([*because, note]), brief=brief)


_CLAIMED_MODES, _CLAIMED_DATA = ("cdp_v1", "cdp_v2"), ("cifar10", "imagenet")


def _briefly(claimed: Sequence[Comparison]) -> str:
    """Return the mean differences of each network, such as `cdp_v1 -1.71, cdp_v2 -0.37 points of top-1 on cifar10`."""
    networks: dict[tuple[str, str], list[str]] = {}
    for each in claimed:
        if each.difference:
            networks.setdefault(_network_of(each.group), []).append(f"{each.group.mode} {each.difference.mean:+.2f}")
    several = len(networks) > 1
    return "; ".join(
        f"{', '.join(told)} points of top-1 on {dataset}{f' with {model}' if several else ''}"
        for (dataset, model), told in networks.items()
    )


def _network_of(group: Group) -> tuple[str, str]:
    """Return the data set and the model."""
    return group.config["dataset.name"], group.config["model.name"]


def _run_of(group: Group) -> str:
    return "{} with {}".format(*_network_of(group)) + f" for {group.config['epochs']} epochs"


def _is_claimed(each: Comparison | Standing) -> bool:
    return each.group.config["dataset.name"] in _CLAIMED_DATA


def _plain_verdict(claimed: Sequence[Comparison]) -> str:
    """Judge by 95 % intervals: one above 0 is better, one below is worse, and one that contains 0 settles nothing.

    The claim holds if both modes are better throughout, holds in part if one is, and fails if all are worse.
    """
    by_mode = {mode: [each.difference for each in claimed if each.group.mode == mode and each.difference]
               for mode in _CLAIMED_MODES}  # fmt: skip
    keeping = [mode for mode, found in by_mode.items() if found and all(interval.low > 0 for interval in found)]
    if keeping:
        return HOLDS if len(keeping) == len(by_mode) else PARTLY
    is_worse = all(found and all(interval.high < 0 for interval in found) for found in by_mode.values())
    return FAILS if is_worse else NOT_SETTLED


def tuned_verdict(judged: Sequence[Standing]) -> str:
    """Judge the claim by the best verdict of each mode on each network, on the data sets that it names.

    It holds if both modes are equivalent or better on every network, holds in part if one is, and fails if both are
    worse on all. Other data sets are evidence but decide nothing.
    """
    by_mode: dict[str, dict[tuple[str, str], set[str]]] = {mode: {} for mode in _CLAIMED_MODES}
    for each in judged:
        if _is_claimed(each):
            by_mode[each.group.mode].setdefault(_network_of(each.group), set()).add(each.verdict)
    verdicts = {mode: [*found.values()] for mode, found in by_mode.items()}
    keeping = [mode for mode, found in verdicts.items() if found and all(one & {EQUIVALENT, BETTER} for one in found)]
    if keeping:
        return HOLDS if len(keeping) == len(verdicts) else PARTLY
    is_worse = all(found and all(one == {WORSE} for one in found) for found in verdicts.values())
    return FAILS if is_worse else NOT_SETTLED


def _fewer_devices(costs: Sequence[Line]) -> Claim:
    text = "With model parallelism CDP needs fewer devices, by sharing them across micro-batches"
    pair = _pair(costs, "model_parallel")
    if pair is None:
        return Claim(4, text, UNKNOWN, "")
    dp, cdp = pair
    ours, theirs = cdp.executed["devices"], dp.executed["devices"]
    price = "sends more" if cdp.simulated["most_sent_bytes"] > dp.simulated["most_sent_bytes"] else "sends no more"
    return Claim(
        4, text, HOLDS if ours < theirs else FAILS,
        f"Executed with N = {cdp.workers}: {ours:g} processes against {theirs:g} (N(N+1)/2 against N^2), idle in "
        f"{100 * cdp.executed['idle_share']:.0f} % of the slots against {100 * dp.executed['idle_share']:.0f} %. "
        f"A device {price}, as fewer share as many micro-batches. {_volume(dp, cdp)} A pipeline with N devices does "
        "the same without idle slots.",
        brief=f"{ours:g} processes against {theirs:g} with N = {cdp.workers}",
    )  # fmt: skip


def _point_to_point(costs: Sequence[Line]) -> Claim:
    text = "Within ZeRO, model states move point to point instead of by a collective broadcast"
    pair = _pair(costs, "zero")
    if pair is None:
        return Claim(5, text, UNKNOWN, "")
    dp, cdp = pair
    most = {mode: _most_lent_at_once(mode, cdp.workers) for mode in ("dp", "cdp_v2")}
    return Claim(
        5, text, HOLDS if most["cdp_v2"] == 1 else FAILS,
        f"Simulated with N = {cdp.workers}: in every slot an owner sends its stage to at most {most['cdp_v2']} worker, "
        f"against {most['dp']} at once in data parallelism. Executed, the longest chain of messages between two slots "
        f"is {cdp.executed['chain']:g} against {dp.executed['chain']:g}; the verdict rests on the fan-out. "
        f"{_volume(dp, cdp)}",
        brief=f"an owner sends to {most['cdp_v2']} worker at once, against {most['dp']}",
    )  # fmt: skip


def _most_lent_at_once(mode: str, workers: int) -> int:
    """Return the largest number of ranks to which an owner sends a stage's parameters in one slot."""
    program = Program(Schedule.build(mode, workers, placement="zero"))
    trace = simulate(program, StageCosts.equal(workers), steps=5)
    lent = Counter((m.slot, m.source, m.stage) for m in trace.messages if m.kind == "parameters")
    return max(lent.values(), default=0)


def _bounded(rows: Sequence[Row]) -> Claim:
    text = "The delay is one training step, so that the theory of bounded-delay SGD applies"
    runs = {(row.cell, row.seed, row.code): row for row in rows}  # a study may have taken over the run of another
    ours = [row for row in runs.values() if row.config["mode.name"] in _CLAIMED_MODES]
    if not ours:
        return Claim(6, text, UNKNOWN, "")
    longest = max(delay for row in ours for stages in row.summary["staleness"] for delay in stages)
    reads = sum(row.summary["ledger/reads"] for row in ours)
    return Claim(
        6, text, HOLDS if longest <= 1 else FAILS,
        f"By the rules of both modes no read is more than {longest} training step old; in {len(ours)} runs all "
        f"{reads:,} forwards and backwards were checked against them, and a run with another read would have failed. "
        "That the theory applies is mathematics and is not tested here; the table of longer delays shows where they "
        "begin to hurt.",
        brief=f"{reads:,} reads checked, none more than {longest} step old",
    )  # fmt: skip
