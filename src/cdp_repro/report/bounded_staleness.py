"""What a bound on staleness brings: waiting, staleness and regret of workers on clocks of their own.

Nothing is trained: the order of pushes follows from the virtual clock, and regret from a convex problem of one number
whose constants are all known. Gradients are of |x - c_t|, at the x that the t-th pull saw. With steps of
F / (L sqrt(2 (s+1) P t)), Ho et al. (2013, theorem 1) bound the regret after T pushes by 4 F L sqrt(2 (s+1) P / T).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle
from statistics import fmean, median

from matplotlib.figure import Figure

from cdp_repro.observe.figures import COLOURS
from cdp_repro.report.charts import plain_axes
from cdp_repro.report.tables import Table
from cdp_repro.schedule.virtual_clock import Round, ticks_of

SPEEDS = (1, 1, 1, 2)
JITTER = 0
BOUNDS = (0, 1, 2, 3, 5, None)
"""Values of s; None is no bound."""
PUSHES = 2**14
"""T."""
LIPSCHITZ = 1.0
"""L of |x - c|."""
WIDTH = 4.0
"""F: half the squared distance between any two points is at most F^2. Points leave [-1, 1] by only a few steps."""


@dataclass(frozen=True)
class Bounded:
    """Workers with one bound."""

    slack: int | None
    waiting: float
    """Share of their time, 0 to 1, that workers spend waiting."""
    staleness: Sequence[int]
    """Of each push of a round: pushes of other workers between its pull and itself."""
    regret: Sequence[float]
    """After 1, 2, 4, .. pushes: their mean loss, minus the smallest that a single x could have had."""
    widest: float
    """The largest distance between two points of the run."""

    def bound(self, pushes: int) -> float:
        """Return the bound on the regret after this many pushes; infinite without a bound on staleness."""
        if self.slack is None:
            return math.inf
        return 4 * WIDTH * LIPSCHITZ * math.sqrt(2 * (self.slack + 1) * len(SPEEDS) / pushes)


@cache
def measured() -> tuple[Bounded, ...]:
    """Return the workers of `SPEEDS`, with `JITTER`, for each of `BOUNDS`."""
    return tuple(map(_measured, BOUNDS))


def _measured(slack: int | None) -> Bounded:
    each = Round.for_workers(ticks_of(SPEEDS, JITTER), slack)
    size, draw = len(each.turns), random.Random(0)
    targets = [draw.uniform(-1, 1) for _ in range(PUSHES)]
    rate = WIDTH / (LIPSCHITZ * math.sqrt(2 * ((slack or 0) + 1) * len(SPEEDS)))
    points, losses = [1.0], []
    for number, target in enumerate(targets):
        rounds, i = divmod(number, size)
        read = points[max(0, rounds * size + each.turns[i].seen)]
        losses.append(abs(read - target))
        points.append(points[-1] - rate / math.sqrt(number + 1) * math.copysign(LIPSCHITZ, read - target))
    busy = sum(turn.end - turn.begin for turn in each.turns)
    return Bounded(
        slack,
        1 - busy / (each.ticks * len(SPEEDS)),
        tuple(number - turn.seen for number, turn in enumerate(each.turns)),
        tuple(_regret(losses, targets)),
        max(points) - min(points),
    )


def _regret(losses: Sequence[float], targets: Sequence[float]) -> list[float]:
    """Return the regret after 1, 2, 4, .. pushes, where the median of the targets is the best x."""
    sums, found = [*accumulate(losses)], []
    for exponent in range(PUSHES.bit_length()):
        pushes = 2**exponent
        best = median(targets[:pushes])
        found.append(sums[pushes - 1] / pushes - fmean(abs(best - target) for target in targets[:pushes]))
    return found


def draw_regret(found: Sequence[Bounded]) -> Figure:
    """Draw the regret against the number of pushes, with the bound on it dashed."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    pushes = [2**exponent for exponent in range(PUSHES.bit_length())]
    for each, colour in zip(found, cycle(COLOURS), strict=False):
        label = "no bound" if each.slack is None else f"s = {each.slack}"
        axis.plot(pushes, each.regret, marker="o", markersize=3, label=label, color=colour)
        if each.slack in (0, max(slack for slack in BOUNDS if slack is not None)):
            axis.plot(pushes, [each.bound(number) for number in pushes], "--", color=colour, linewidth=0.9)
    axis.set(xscale="log", yscale="log", xlabel="pushes, T", ylabel="regret (dashed: its bound)")
    plain_axes(axis)
    axis.legend(frameon=False, fontsize="small", ncols=2)
    return figure


def regret_caption() -> str:
    """Return the caption of `draw_regret`."""
    jitter = ", and jitter," if JITTER else ""
    return (
        f"Workers with speeds of their own{jitter} that push to a server: regret on a convex problem of which all is "
        "known, and the bound of Ho et al. (2013) for the smallest and the largest s. A fast worker cannot run ahead "
        "for ever, so that every s above 0 waits alike; without a bound nobody waits, and reads are older."
    )


def regret_table(found: Sequence[Bounded]) -> Table:
    """Return waiting, staleness, regret and its bound for each bound on staleness."""
    rows = [
        ["none" if each.slack is None else str(each.slack), f"{100 * each.waiting:.1f} %",
         f"{fmean(each.staleness):.2f}", str(max(each.staleness)), f"{each.regret[-1]:.4f}",
         "–" if each.slack is None else f"{each.bound(PUSHES):.4f}"]
        for each in found
    ]  # fmt: skip
    widest = max(each.widest for each in found)
    notes = [
        f"{len(SPEEDS)} workers, speeds={[*SPEEDS]} jitter={JITTER}, by the virtual clock of `mode=ssp` and "
        "`mode=async`. Staleness: pushes of others between a pull and its own push. Regret: SGD on |x - c_t| from "
        f"these pulls, c_t uniform in [-1, 1], after T = {PUSHES:,} pushes; without a bound, by the steps of s = 0. "
        f"Its bound is 4 F L sqrt(2 (s+1) P / T) (Ho et al. 2013), with F = {WIDTH:g}, L = {LIPSCHITZ:g}, "
        f"P = {len(SPEEDS)}: no two points of a run are further apart than {widest:.2f}, and F allows "
        f"{math.sqrt(2) * WIDTH:.2f}."
    ]
    columns = ("s", "waiting", "mean staleness", "largest", "regret", "its bound")
    return Table("regret", "Bounded staleness", columns, rows, notes, ["Computed anew by each `cdp-report build`."])
