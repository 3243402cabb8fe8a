"""Cut a chain of blocks into stages: the exact min-max contiguous partition (pure Python, no torch)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


class StagesError(ValueError):
    """The blocks cannot be cut into that number of stages; `most` is the largest number that works."""

    def __init__(self, message: str, most: int) -> None:
        super().__init__(message)
        self.most = most


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cut blocks 0..n-1 into `stages` non-empty contiguous runs such that the costliest run is as cheap as possible.

    Among the partitions with the smallest possible maximum, the most even one is returned: that with the smallest sum
    of squared stage costs. Of equally even ones, it is the one whose last stage starts latest, then the stage before
    it, and so on. The result is exact and does not depend on the unit of the costs: sums are taken in whole numbers, so
    rounding never decides.

    Args:
        costs: cost of each block in forward order, finite and not negative; any unit (FLOPs, bytes, seconds).
        stages: number of runs S, 1 <= S <= n.

    Returns:
        S ranges of block indices that follow each other and cover 0..n-1.

    Raises:
        ValueError: more stages than blocks, fewer than one stage, or a cost that is negative or not finite.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise StagesError(
            f"{blocks} blocks cannot be cut into stages={stages}: every stage needs a block of its own; "
            + (f"use stages between 1 and {blocks}" if blocks else "give at least one block"),
            blocks,
        )
    prefix = list(accumulate(_whole_numbers(costs), initial=0))
    bound, _ = _best_cuts(prefix, stages, limit=prefix[-1], weigh=lambda cost: cost, join=max)
    _, cuts = _best_cuts(prefix, stages, limit=bound, weigh=lambda cost: cost * cost, join=operator.add)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def partition_branches(costs: Sequence[float], branches: Sequence[int], stages: int) -> list[range]:
    """Cut each branch by itself, into an equal share of the stages: `branches` are their numbers of blocks.

    Raises:
        ValueError: as `partition`, or the branches do not share the stages equally.
    """
    if len(branches) == 1:
        return partition(costs, stages)
    share, rest = divmod(stages, len(branches))
    if rest or not share or share > min(branches):
        most = min(branches) * len(branches)
        raise StagesError(
            f"branches of {', '.join(map(str, branches))} blocks cannot have equal shares of stages={stages}: use a "
            f"multiple of {len(branches)}, at most stages={most}",
            most,
        )
    found: list[range] = []
    for start, stop in pairwise(accumulate(branches, initial=0)):
        found += [range(run.start + start, run.stop + start) for run in partition(costs[start:stop], share)]
    return found


def imbalance(stage_costs: Sequence[float]) -> float:
    """Return the largest stage cost over the mean stage cost: 1.0 is perfect, S means one stage has everything.

    Stages that all cost nothing are balanced (1.0). Raises ValueError when there is no stage.
    """
    if not stage_costs:
        raise ValueError("imbalance needs at least one stage cost, and there are 0")
    total = math.fsum(stage_costs)
    return max(stage_costs) * len(stage_costs) / total if total else 1.0


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Return integers in the same proportions as `costs`, exactly (every float is a whole multiple of a power of 2)."""
    for block, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of block {block} is {cost}: costs are finite and not negative")
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _best_cuts(
    prefix: Sequence[int],
    stages: int,
    limit: int,
    weigh: Callable[[int], int],
    join: Callable[[int, int], int],
) -> tuple[int, list[int]]:
    """Minimise join(weigh(cost of stage 0), ..., weigh(cost of stage S-1)) over stages that cost at most `limit`.

    Returns the smallest value and the S+1 positions of the cuts.

    best[k][stop] is the smallest value for blocks 0..stop-1 in k stages and start[k][stop] where its last stage
    starts:  best[k][stop] = min over cut of join(best[k-1][cut], weigh(prefix[stop] - prefix[cut])).
    `join` is max or addition. Time O(n^2 S).
    """
    blocks = len(prefix) - 1
    # Above every maximum and every sum of squares. Not math.inf: adding a very large integer to it overflows.
    impossible = prefix[-1] ** 2 + 1

    def value(before: int, cost: int) -> int:
        return join(before, weigh(cost)) if cost <= limit else impossible

    best = [0] + [impossible] * blocks
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        row, start = [impossible] * (blocks + 1), [0] * (blocks + 1)
        for stop in range(stage, blocks - (stages - stage) + 1):
            # The last of equal cuts wins (see `partition`); -cut makes the choice part of the comparison.
            row[stop], latest = min(
                (value(best[cut], prefix[stop] - prefix[cut]), -cut) for cut in range(stage - 1, stop)
            )
            start[stop] = -latest
        best = row
        starts.append(start)
    cuts = [blocks]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return best[blocks], cuts[::-1]
