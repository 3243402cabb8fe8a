"""Refuses timelines, rules and placements of other packages that give no numbers from which a program can be made.

Ours are not asked: they give the numbers that their own tests check, and a large schedule has many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cdp_repro.schedule.by_name import refusing
from cdp_repro.schedule.placements import Placement
from cdp_repro.schedule.rules import Rule
from cdp_repro.schedule.timelines.timeline import Timeline

_OURS = f"{__name__.partition('.')[0]}."


class ForeignError(ValueError):
    """A timeline, rule or placement of another package gives something from which no program can be made."""


def check_foreign(timeline: Timeline, rule: Rule, placement: Placement) -> None:
    """Check those of the three that are not ours.

    Raises:
        ForeignError: a slot, a staleness or a rank is no whole number from 0; a stage has no holder; it has several,
            and other ranks compute it; a rank that borrows a stage begins late; a rank has nothing to do.
    """
    checks = (
        (timeline, partial(_check_timeline, timeline)),
        (rule, partial(_check_numbers, rule, ("staleness", "backward_staleness"))),
        (placement, partial(_check_placement, placement)),
    )
    for part, check in checks:
        if not type(part).__module__.startswith(_OURS):
            with refusing(_named(part), ForeignError):
                check()


def _check_timeline(timeline: Timeline) -> None:
    period = _number(timeline, "period", timeline.period, least=1)
    _check_numbers(timeline, ("forward", "backward", "backward_weights"))
    sizes = timeline.sizes
    for i in range(sizes.turns):
        for j, sources in enumerate(sizes.sources):
            for source in sources:
                _in_order(timeline, ("forward", i, source), ("forward", i, j), "it makes its input")
                _in_order(timeline, ("backward", i, j), ("backward", i, source), "it makes its gradient")
            _in_order(timeline, ("forward", i, j), ("backward", i, j), "it saves what it needs")
            _in_order(timeline, ("backward", i, j), ("backward_weights", i, j), "it makes what it needs")
            if i + 1 < sizes.turns:
                why = "gradients are added in the order of the micro-batches"
                _in_order(timeline, ("backward_weights", i, j), ("backward_weights", i + 1, j), why)
    for j in range(sizes.stages):
        last, first = timeline.backward_weights(sizes.turns - 1, j), timeline.backward_weights(0, j) + period
        if last > first:
            raise ForeignError(
                f"{_named(timeline)}: backward_weights({sizes.turns - 1}, {j}) is {last}, after "
                f"backward_weights(0, {j}) of the next training step, {first}: give a period of at least "
                f"{period + last - first}"
            )


_Compute = tuple[str, int, int]
"""A function of a timeline, and its arguments: micro-batch i and stage j."""


def _in_order(timeline: Timeline, one: _Compute, other: _Compute, why: str) -> None:
    (name, i, j), (later, k, stage) = one, other
    begins, needs = getattr(timeline, name)(i, j), getattr(timeline, later)(k, stage)
    if needs < begins:
        raise ForeignError(
            f"{_named(timeline)}: {later}({k}, {stage}) is {needs}, before {name}({i}, {j}), {begins}: {why}"
        )


def _check_numbers(part: Timeline | Rule, functions: Sequence[str]) -> None:
    """Check that functions of turn i and stage j give whole numbers from 0."""
    for i in range(part.sizes.turns):
        for j in range(part.sizes.stages):
            for name in functions:
                _number(part, f"{name}({i}, {j})", getattr(part, name)(i, j))


def _check_placement(placement: Placement) -> None:
    sizes, working = placement.timeline.sizes, set[int]()
    for stage in range(sizes.stages):
        holders = [_number(placement, f"a rank of holders({stage})", rank) for rank in placement.holders(stage)]
        if not holders:
            raise ForeignError(f"{_named(placement)}: holders({stage}) is empty: give at least one rank")
        # `Placement.ranks` and `Schedule.lent` ask for the micro-batches of one turn of all lanes; twice as many show
        # whether a rank begins later.
        micro_batches = range(sizes.lanes * max(2, len(holders)))
        ranks = [_number(placement, f"rank_of({m}, {stage})", placement.rank_of(m, stage)) for m in micro_batches]
        computing, begin_at_once = {*ranks}, {*ranks[: sizes.lanes]}
        borrows_at_once = bool(begin_at_once - {*holders})
        late = [(m, rank) for m, rank in enumerate(ranks) if rank not in begin_at_once.union(holders)]
        if unknown := [(m, rank) for m, rank in late if not borrows_at_once or rank >= placement.ranks]:
            micro_batch, rank = unknown[0]
            raise ForeignError(
                f"{_named(placement)}: rank_of({micro_batch}, {stage}) is {rank}, which neither holds stage "
                f"{stage} nor computes it for the {sizes.lanes} micro-batches that are under way at once: let the "
                f"ranks that borrow a stage repeat after {sizes.lanes} micro-batches"
            )
        if len(holders) > 1 and computing != {*holders}:
            raise ForeignError(
                f"{_named(placement)}: the ranks {holders} hold stage {stage}, but {sorted(computing)} compute it: "
                "several holders take turns to compute a stage, each for some micro-batches; only one that holds it "
                "alone lends it to other ranks"
            )
        working |= computing.union(holders)
    if idle := {*range(max(working))} - working:
        raise ForeignError(
            f"{_named(placement)}: the ranks {sorted(idle)} neither hold nor compute a stage: number those that do "
            "from 0 on, without gaps"
        )


def _number(part: object, what: str, found: object, least: int = 0) -> int:
    if type(found) is not int or found < least:
        raise ForeignError(f"{_named(part)}: {what} is {found!r}: give a whole number, at least {least}")
    return found


def _named(part: object) -> str:
    return type(part).__name__
