"""What the tests of programs share: schedules of all kinds, their runs written out, and the check of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from hypothesis import strategies as st

from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, MODES, PLACEMENTS, Action, Op, Schedule, Slot
from cdp_repro.schedule.check import Checker
from cdp_repro.schedule.generate import generate
from cdp_repro.schedule.schedule_spec import CHOOSING_PLACEMENTS

CYCLIC = ("cdp_v1", "cdp_v2")
DISTRIBUTED = tuple(name for name in PLACEMENTS if name != "single_device")
ORDERS = ("paper", "backward_first")
STALE = [[3, 1, 1], [1, 2, 1], [2, 0, 1]]


def smallest_staleness(n: int, s: int, k: int = 1, m: int | None = None) -> list[list[int]]:
    """By brute force: a version exists from the slot after the last backward of its step on, and not before."""
    delay, turns, step = 2 * s // n, m or n * k, 5

    def exists(version: int, j: int) -> int:
        return delay * (version * turns - 1) + 2 * s - 1 - j + 1

    def smallest(i: int, j: int) -> int:
        read = delay * (step * turns + i) + j
        return next(d for d in range(step) if exists(step - d, j) <= read)

    return [[smallest(i, j) for j in range(s)] for i in range(turns)]


@st.composite
def schedules(draw, workers=4, accumulate=3, placements=tuple(PLACEMENTS), replicas=2):
    """Schedules of every timeline, rule, placement and summation."""
    n, k, r = draw(st.integers(1, workers)), draw(st.integers(1, accumulate)), draw(st.integers(1, replicas))
    s = n * draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["dp", *CYCLIC, "accumulation", "matrix"]))
    placement = "single_device" if mode == "accumulation" else draw(st.sampled_from(placements))
    if mode == "matrix":
        smallest = smallest_staleness(n, s, k)
        late = draw(st.integers(0, 2))
        mode = [[d + late * ((i + j) % 2) for j, d in enumerate(row)] for i, row in enumerate(smallest)]
    ranks = None
    if placement == "pipeline":
        ranks = draw(st.sampled_from([d for d in range(1, s + 1) if s % d == 0 and (mode == "dp" or d % n == 0)]))
    collectives = mode == "dp" and placement in COLLECTIVE_PLACEMENTS and draw(st.booleans())
    return Schedule.build(
        mode, n, s, placement, draw(st.sampled_from(ORDERS)), accumulate=k, replicas=r, ranks=ranks,
        pipeline_schedule=draw(st.sampled_from(["one_f_one_b", "gpipe"])), collectives=collectives,
    )  # fmt: skip


ANYWHERE = ("dp", "cdp_v1", "cdp_v2", "matrix")
"""Modes that every placement can have; others are for pipelines."""


def kinds() -> Iterator[Schedule]:
    """Every mode, placement, slot order, summation, accumulation and number of replicas once, in small sizes."""
    for mode, placement, r in product(("dp", "cdp_v1", "cdp_v2", "naive", "gpipe"), CHOOSING_PLACEMENTS, (1, 2)):
        yield Schedule.build(mode, 3, placement=placement, micro_batches=4, replicas=r)
    modes = [*((mode, None) for mode in MODES), ("matrix", STALE)]
    sizes = ((1, 1), (2, 1), (1, 2))
    for (name, matrix), placement, order, (k, r) in product(modes, PLACEMENTS, ORDERS, sizes):
        pushes = matrix is None and MODES[name].has_own_clocks
        if name not in ANYWHERE and placement not in ("single_device", "parameter_server" if pushes else "pipeline"):
            continue
        if pushes:
            if (k, r) == (1, 1):
                for speeds, jitter, message in ((None, None, None), ((1, 1, 2), None, 1), ((1, 2, 3), 0, None)):
                    yield Schedule.build(
                        name, 3, 2, placement, order, speeds=speeds, jitter=jitter, message_time=message
                    )
            continue
        if (matrix is None and MODES[name].updates_each and k > 1) or (name == "chimera" and r > 1):
            continue
        mode = (matrix * k) if matrix else name
        if matrix and k > 1:
            mode = [[max(1, d) for d in row] for row in mode]
        for collectives in (False, True) if name == "dp" and placement in ("replicated", "zero") else (False,):
            for flush in ("gpipe", "one_f_one_b") if (name, placement) == ("dp", "pipeline") else ("one_f_one_b",):
                workers = 4 if name == "chimera" else 3
                yield Schedule.build(mode, workers, placement=placement, slot_order=order, accumulate=k, replicas=r,
                                     collectives=collectives, pipeline_schedule=flush)  # fmt: skip


def written(schedule: Schedule, steps: int, first_step: int = 0) -> list[Slot]:
    """A run, as the passes make it."""
    return generate(schedule, first_step, steps)


def checked(schedule: Schedule, slots: Sequence[Slot], steps: int, first_step: int = 0) -> list[Slot]:
    """Check a run as a program does."""
    checker = Checker(schedule, first_step, slots)
    checker.end(steps)
    (found,) = checker.pieces
    return found


def lists(slots: Iterable[Slot]) -> list[list[Action]]:
    """The actions of each slot, to be changed."""
    return [list(slot.actions) for slot in slots]


def slots_of(actions: Iterable[Iterable[Action]]) -> list[Slot]:
    return [Slot(number, tuple(each)) for number, each in enumerate(actions)]


def of_rank(slots: Iterable[Slot], rank: int) -> list[list[Action]]:
    """The actions of one rank in each slot."""
    return [[action for action in slot.actions if action.rank == rank] for slot in slots]


def placed(slots: Iterable[Slot], *ops: Op) -> dict[Action, int]:
    """The slot of each action of some kinds, all of which differ."""
    found: dict[Action, int] = {}
    for slot in slots:
        for action in slot.actions:
            if action.op in ops:
                assert action not in found
                found[action] = slot.number
    return found
