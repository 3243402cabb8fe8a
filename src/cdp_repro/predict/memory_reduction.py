"""CDP's activation peak over that of data parallelism, predicted for any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.partition import partition
from cdp_repro.predict.simulate import simulate_slots
from cdp_repro.schedule import Schedule, Slot
from cdp_repro.schedule.generate import generate

WORKERS = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Numbers of workers of the figure's curves."""


def theory(workers: int) -> float:
    """Return (N+1)/2N: CDP's peak over DP's for equal stages, in the paper's slot order."""
    return (workers + 1) / (2 * workers)


@cache
def _timeline(workers: int, order: str) -> tuple[Schedule, list[Slot]]:
    """Return the schedule and its first two training steps, in which the peak is reached.

    They are generated without a `Program`, which checks a schedule: that takes three times as long, and this one is
    known to be right.
    """
    schedule = Schedule.build("cdp_v2", workers, slot_order=order)
    return schedule, generate(schedule, 0, 2)


def reduction(costs: StageCosts, order: str) -> float:
    """Return the simulated peak of CDP-v2 over that of DP, N micro-batches at once, with N = S."""
    schedule, slots = _timeline(costs.stages, order)
    trace = simulate_slots(schedule, costs, slots)
    return trace.activation_peak_bytes_total / (costs.stages * costs.activation_bytes)


def divided(blocks: StageCosts, workers: int, cut: str) -> StageCosts:
    """Return the stages that `workers` would have, from the costs of the blocks.

    With at most as many stages as blocks, the cut is that of a run. With more, blocks are treated as divisible: their
    bytes spread evenly over their weight, which is FLOPs, or bytes for `cut` = "activations".
    """
    weights = [f + b for f, b in zip(blocks.forward_flops, blocks.backward_flops, strict=True)]
    if cut == "activations":
        weights = list(blocks.forward_bytes)
    if workers <= blocks.stages:
        ranges = partition(weights, workers)
        kept = [sum(blocks.forward_bytes[k] for k in run) for run in ranges]
    else:
        kept = _sliced(weights, blocks.forward_bytes, workers)
    ones = (1,) * workers
    return StageCosts(tuple(kept), tuple(kept), ones, ones, ones)


def _sliced(weights: Sequence[float], values: Sequence[int], parts: int) -> list[int]:
    """Cut a profile at any point into parts of equal weight; return the value of each, rounded so that the total stays
    the same."""
    ends = [0.0, *accumulate(float(weight) for weight in weights)]
    sums = [0, *accumulate(values)]

    def value_up_to(weight: float) -> int:
        block = max(k for k in range(len(weights)) if ends[k] <= weight)
        share = (weight - ends[block]) / (weights[block] or 1)
        return round(sums[block] + share * values[block])

    borders = [value_up_to(ends[-1] * part / parts) for part in range(parts)] + [sums[-1]]
    return [end - begin for begin, end in pairwise(borders)]


@cache
def curve(blocks: StageCosts, cut: str, order: str) -> dict[int, float]:
    """Return the simulated reduction for each number of workers."""
    return {workers: reduction(divided(blocks, workers, cut), order) for workers in WORKERS}
