"""A virtual clock: it orders the pushes of workers of different speeds to parameter servers, before anything runs.

A worker that starts pulls the parameters. It sees all pushes that have arrived, including its own. After computing, it
pushes; each push is an update. A worker may start only if it is at most `slack` pushes ahead of the slowest worker
(Ho et al. 2013). At the same tick, the worker with the lower number goes first. A pull and a push may each take some
ticks to arrive, the same number for both.

Two workers, the second half as fast, no bound. `3>5` reads the version made by 3 pushes, and is the fifth push:

    tick      0     1     2     3     4
    worker 0  0>1   1>2   2>4   4>5          a round: 2 ticks, 3 pushes
    worker 1  0>3         3>6

The order repeats: a round is the time between two moments at which all workers are in the same state. Every round is
the same, even the first, as if workers had been running before: fast workers are as far ahead as the bound allows.
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
"""The order of pushes must repeat within this many."""

Durations = tuple[tuple[int, ...], ...]
"""For each worker, the ticks of its consecutive micro-batches; after the last, they start over."""

_PAIRS = 2
"""Pairs of micro-batches after which a worker's jittered durations repeat; a pair takes as long as two even ones."""
_PARTS = 4
"""With jitter, one tick becomes this many, so that uneven times are whole ticks, too."""


class Ticks(NamedTuple):
    """Times on a clock as fine as workers and messages need."""

    durations: Durations
    message: int
    """The ticks of a pull, and of a push."""


def ticks_of(speeds: Sequence[int], jitter: int | None = None, message_time: float = 0) -> Ticks:
    """Return the ticks of workers, given how many micro-batches each computes in the same time, and of their messages.

    `jitter` is a seed. With it, the time of a micro-batch is drawn between half and one and a half times the even time;
    any four consecutive ones take as long as even ones. `message_time` is in micro-batches of the fastest worker.
    """
    common = math.lcm(*speeds)
    message = Fraction(str(message_time)) * common / max(speeds)  # from its decimal digits: 0.1 is exactly a tenth
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
    """A micro-batch of a worker, from its pull to its push. All workers' turns are numbered in the order of pushes."""

    worker: int
    begin: int
    """The tick at which the worker asks for the parameters."""
    end: int
    """The tick at which its push arrives; others see it from then on."""
    seen: int
    """Number of pushes, of all workers, that its pull sees: the version that it reads."""
    computing: int
    """Ticks in which the worker computes; the rest are those of the pull and of the push."""


@dataclass(frozen=True)
class Round:
    """The part of the order that repeats every `ticks`: `turns`, in the order of their pushes."""

    ticks: int
    turns: tuple[Turn, ...]
    """Ticks count from the first pull of the round; `seen` counts from its first push, and may be negative."""

    @classmethod
    def for_workers(cls, workers: Ticks, slack: int | None = None) -> Round:
        """Return the round of these workers; with `slack` None there is no bound.

        Raises:
            ValueError: the order does not repeat early enough.
        """
        pushed: list[Turn] = []
        moments: dict[object, tuple[int, int]] = {}
        ticking = run(workers, slack)
        for tick, state, ended in ticking:
            pushed += ended
            if state in moments:
                break
            moments[state] = tick, len(pushed)
            if len(pushed) > MOST_PUSHES:
                raise ValueError(
                    f"workers with these speeds do not stand alike again within {MOST_PUSHES} pushes: use fewer "
                    "workers, smaller speeds, or a smaller slack"
                )
        (earlier, before), begin = moments[state], len(pushed)
        stop = 2 * begin - before
        while len(pushed) < stop:  # a turn may have begun in the round before its push: the second round is complete
            pushed += next(ticking)[-1]
        turns = pushed[begin:stop]
        first = min(turn.begin for turn in turns)
        moved = (
            turn._replace(begin=turn.begin - first, end=turn.end - first, seen=turn.seen - begin) for turn in turns
        )
        return cls(tick - earlier, tuple(moved))


def run(ticks: Ticks, slack: int | None) -> Iterator[tuple[int, object, list[Turn]]]:
    """Yield (tick, state of all workers, turns that end at this tick) for every tick; all workers start at tick 0.

    The future depends only on the state. For each worker it has the ticks left in its turn, its lead over the slowest
    worker if that is bounded, and its place in its durations.
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
                for each in (worker, *workers):  # others may have waited for this push
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
