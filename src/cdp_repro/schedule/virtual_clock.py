"""A virtual clock: in which order workers of different speeds push to parameter servers, before anything runs.

A worker that starts pulls the parameters, and sees all pushes that have arrived, its own among them; when it has
computed, it pushes, and each push is an update. It may start only if it has pushed at most `slack` times more than the
slowest worker has (Ho et al. 2013). At the same tick, the lower worker is first. What it pulls may need some ticks to
arrive, and its push as many.

Two workers, the second half as fast, no bound. `3>5` computes with what 3 pushes have made, and is the fifth push:

    tick      0     1     2     3     4
    worker 0  0>1   1>2   2>4   4>5          a round: 2 ticks, 3 pushes
    worker 1  0>3         3>6

The order repeats: a round is what happens between two moments at which all workers stand alike. Every round is the
same, the first one too, as if workers had been running before: fast ones are as far ahead as the bound lets them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import NamedTuple

MOST_PUSHES = 20_000
"""In which the order of pushes must repeat."""

Durations = tuple[tuple[int, ...], ...]
"""Of each worker: the ticks of its micro-batches, one after the other and then from the first on again."""

_PAIRS = 2
"""Of micro-batches with jitter, after which a worker's durations repeat: one is as much longer as the other shorter."""
_PARTS = 4
"""Ticks in place of one where there is jitter, so that uneven times are whole ticks, too."""


class Ticks(NamedTuple):
    """Of a clock as fine as its workers and messages need."""

    durations: Durations
    message: int
    """Of a pull, and of a push."""


def ticks_of(speeds: Sequence[int], jitter: int | None = None, message_time: float = 0) -> Ticks:
    """Return the ticks of workers that compute so many micro-batches in the same time, and of their messages.

    `jitter` is a seed. With it a micro-batch takes between half and one and a half of its worker's time, as drawn; the
    sum over four of them is that of even ones. `message_time` is in micro-batches of the fastest worker.
    """
    common = math.lcm(*speeds)
    message = Fraction(str(message_time)) * common / max(speeds)  # by its digits: 0.1 is a tenth
    even = [message.denominator * common // speed for speed in speeds]
    if jitter is None:
        return Ticks(tuple((ticks,) for ticks in even), message.numerator)
    draw = random.Random(jitter)
    found = []
    for ticks in (_PARTS * each for each in even):
        changes = [draw.randint(0, ticks // 2) for _ in range(_PAIRS)]
        uneven = [ticks + sign * change for change in changes for sign in (1, -1)]
        draw.shuffle(uneven)
        found.append(tuple(uneven))
    return Ticks(tuple(found), _PARTS * message.numerator)


class Turn(NamedTuple):
    """A micro-batch of a worker, from its pull to its push. Those of all workers are numbered as they push."""

    worker: int
    begin: int
    """The tick at which it asks for the parameters."""
    end: int
    """The tick at which its push arrives: from then on others see it."""
    seen: int
    """Pushes of all workers that its pull sees: the version that it reads."""
    computing: int
    """Ticks of it in which the worker computes; the others are those of the pull and of the push."""


@dataclass(frozen=True)
class Round:
    """What repeats: `turns` in the order of their pushes; `ticks` later the same again."""

    ticks: int
    turns: tuple[Turn, ...]
    """Ticks are counted from the first pull of the round, `seen` from its first push, so that it may be negative."""

    @classmethod
    def of(cls, workers: Ticks, slack: int | None = None) -> Round:
        """Return the round of these workers; `slack` None sets no bound.

        Raises:
            ValueError: the order does not repeat early enough.
        """
        pushed: list[Turn] = []
        moments: dict[object, tuple[int, int]] = {}
        ticks = begin = stop = 0
        for tick, state, ended in run(workers, slack):
            pushed += ended
            if not ticks and state in moments:
                earlier, begin = moments[state]
                ticks, begin, stop = tick - earlier, len(pushed), 2 * len(pushed) - begin
            moments.setdefault(state, (tick, len(pushed)))
            # what is pushed in one round may have been pulled in the one before: the second one is whole
            if ticks and len(pushed) >= stop:
                break
            if not ticks and len(pushed) > MOST_PUSHES:
                raise ValueError(
                    f"workers with these speeds do not stand alike again within {MOST_PUSHES} pushes: use fewer "
                    "workers, smaller speeds, or a smaller slack"
                )
        turns = pushed[begin:stop]
        first = min(turn.begin for turn in turns)
        moved = (
            turn._replace(begin=turn.begin - first, end=turn.end - first, seen=turn.seen - begin) for turn in turns
        )
        return cls(ticks, tuple(moved))


def run(ticks: Ticks, slack: int | None = None) -> Iterator[tuple[int, object, list[Turn]]]:
    """Yield, tick by tick, (tick, state of all workers, turns that end there); all workers start at tick 0.

    The state is all that the rest depends on: of each worker the ticks that it still needs, how far it is ahead of the
    slowest one if that is bounded, and its place in its durations.
    """
    durations, message = ticks
    workers = range(len(durations))
    clocks = [0] * len(durations)
    running: dict[int, Turn] = {}
    pushes = 0

    def start(worker: int, tick: int) -> None:
        if worker not in running and (slack is None or clocks[worker] - min(clocks) <= slack):
            computing = durations[worker][clocks[worker] % len(durations[worker])]
            running[worker] = Turn(worker, tick, tick + computing + 2 * message, pushes, computing)

    for worker in workers:
        start(worker, 0)
    for tick in count():
        ended: list[Turn] = []
        for worker in workers:
            if worker in running and running[worker].end == tick:
                ended.append(running.pop(worker))
                clocks[worker] += 1
                pushes += 1
                for each in (worker, *workers):  # others wait until the slowest one has pushed
                    start(each, tick)
        slowest = min(clocks)
        state = tuple(
            (
                running[worker].end - tick if worker in running else 0,
                0 if slack is None else clocks[worker] - slowest,
                clocks[worker] % len(durations[worker]),
            )
            for worker in workers
        )
        yield tick, state, ended
