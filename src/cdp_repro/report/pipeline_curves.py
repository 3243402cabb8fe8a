"""Pipelines against the number of micro-batches: the curves of lectures and papers, from our own programs.

Nothing is trained: idle shares and memory follow from a program, seconds from its price on links that cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from matplotlib.figure import Figure

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing import Cluster, price
from cdp_repro.predict.simulate import simulate
from cdp_repro.predict.system_specs import CHUNKS
from cdp_repro.report.charts import not_of_the_paper, plain_axes, style
from cdp_repro.report.tables import Table
from cdp_repro.schedule import Program, Schedule

RANKS = 4
"""D of the curves."""
MICRO_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
"""M of the curves; a system has a point for each M that it can have."""
LEVELLING = ("gpipe", "one_f_one_b")
"""The two systems whose memory is compared."""
SYSTEMS = ("naive", "gpipe", "interleaved", "chimera", "zero_bubble", "cdp_v2")
"""Without `one_f_one_b`, which idles as `gpipe` does."""

GPIPE_PUBLISHED: Mapping[tuple[int, int], float] = {
    (2, 1): 1.0, (4, 1): 1.07, (8, 1): 1.3,
    (2, 4): 1.7, (4, 4): 3.2, (8, 4): 4.8,
    (2, 32): 1.8, (4, 32): 3.4, (8, 32): 6.3,
}  # fmt: skip
"""By D and M: throughput of Transformer-48 on TPUs over that of D = 2, M = 1 (Huang et al. 2019, GPipe, table 2)."""


@dataclass(frozen=True)
class Curves:
    """What a system costs with each number of micro-batches that it can have."""

    idle: Mapping[str, Mapping[int, float]]
    """By system and M: share of the slots of all ranks in which a rank computes nothing."""
    activations: Mapping[str, Mapping[int, int]]
    """By system and M: micro-batches whose activations the first rank keeps at the peak."""


def _schedule(mode: str, micro_batches: int, ranks: int = RANKS) -> Schedule:
    """Return a system with D ranks and M micro-batches; raise ValueError if it cannot have them."""
    stages = ranks * CHUNKS if mode == "interleaved" else ranks
    if mode != "cdp_v2":  # where a pipeline is flushed, only M counts
        return Schedule.build(mode, micro_batches, stages, "pipeline", ranks=ranks)
    if micro_batches % ranks:
        raise ValueError(f"M={micro_batches} is no multiple of N={ranks}: use M={ranks}")
    return Schedule.build(mode, ranks, stages, "pipeline", accumulate=micro_batches // ranks)


def idle_share(schedule: Schedule) -> float:
    """Return the mean share of the slots of a training step in which a rank of the pipeline computes nothing."""
    parts = 3 if schedule.timeline.splits_backward else 2
    computes = parts * schedule.micro_batches * schedule.stages
    return 1 - computes / (schedule.ranks * schedule.slots_per_step)


@cache
def curves() -> Curves:
    """Return the curves of D = 4 ranks with equal stages."""
    idle: dict[str, dict[int, float]] = {mode: {} for mode in SYSTEMS}
    for mode in SYSTEMS:
        for number in MICRO_BATCHES:
            try:
                idle[mode][number] = idle_share(_schedule(mode, number))
            except ValueError:  # e.g. an odd number for Chimera
                continue
    activations = {mode: {number: _kept(_schedule(mode, number)) for number in MICRO_BATCHES} for mode in LEVELLING}
    return Curves(idle, activations)


def _kept(schedule: Schedule) -> int:
    """Return the micro-batches whose activations the rank with most keeps, with stages of one byte."""
    return simulate(Program(schedule), StageCosts.equal(schedule.stages), 1).activation_peak_bytes_per_device


def draw_curves(found: Curves) -> Figure:
    """Draw activations and idle shares against the number of micro-batches."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    memory, idle = figure.subplots(1, 2)
    others = not_of_the_paper([*dict.fromkeys([*found.idle, *found.activations])])
    for mode, points in found.activations.items():
        memory.plot([*points], [*points.values()], marker="o", markersize=3, label=mode, **style(mode, others))
    memory.set_ylabel("micro-batches kept by the first rank")
    for mode, shares in found.idle.items():
        percent = [100 * share for share in shares.values()]
        idle.plot([*shares], percent, marker="o", markersize=3, label=mode, **style(mode, others))
    idle.set_ylabel("idle slots [%]")
    for axis in (memory, idle):
        axis.set_xlabel("micro-batches of a training step, M")
        axis.set_ylim(bottom=0)
        plain_axes(axis)
        axis.legend(frameon=False, fontsize="small")
    return figure


def priced_throughput(ranks: int, micro_batches: int) -> float:
    """Return mini-batches per second of `gpipe` if one device takes a second for one, and messages take no time."""
    each = 1 / (ranks * micro_batches)
    cluster = Cluster.equal(ranks, forward=each / 3, backward=2 * each / 3)
    return 1 / price(Program(_schedule("gpipe", micro_batches, ranks)), StageCosts.equal(ranks), cluster).step_seconds


def gpipe_table() -> Table:
    """Return GPipe's published throughput beside our price and the closed form, each over D = 2, M = 1."""
    first = priced_throughput(2, 1)
    rows = [
        [str(ranks), str(number), f"{published:g}", f"{priced_throughput(ranks, number) / first:.2f}",
         f"{ranks * number / (number + ranks - 1):.2f}"]
        for (ranks, number), published in sorted(GPIPE_PUBLISHED.items())
    ]  # fmt: skip
    notes = [
        "Throughput over that of D = 2, M = 1. Published: Transformer-48 on TPUs (Huang et al. 2019). Priced: the "
        "program of `mode=gpipe` with equal stages, links that cost nothing and a backward of two forwards. The "
        "closed form is D M / (M + D - 1). For M = 1 and 4 the published numbers lie above it, so that more has "
        "changed there than D and M."
    ]
    columns, evidence = ("D", "M", "published", "priced", "closed form"), ["Priced anew by each `cdp-report build`."]
    return Table("gpipe", "GPipe's throughput", columns, rows, notes, evidence)
