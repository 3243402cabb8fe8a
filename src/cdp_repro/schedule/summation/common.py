"""Code that strategies share: gradients of a backward, updates, and the place of an action in a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import zip_longest

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.meaning import made_from, update
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule


def members_with(schedule: Schedule, micro_batch: int) -> range:
    """Return the micro-batches that are summed for the same update as `micro_batch`, including itself."""
    first = micro_batch - micro_batch % schedule.sizes.summed
    return range(first, first + schedule.sizes.summed)


def replace_backwards(slots: Slots, stages: frozenset[int], by: Callable[[Action], Iterable[Action]]) -> Slots:
    """Replace each action that gives gradients of `stages` by the actions that `by` returns."""

    def replaced(action: Action) -> Iterable[Action]:
        return by(action) if action.op.gives_gradients and action.stage in stages else (action,)

    return [[each for action in actions for each in replaced(action)] for actions in slots]


def completed(action: Action, schedule: Schedule, stages: frozenset[int]) -> int | None:
    """Return the version that can be made once `action` completes the sum of one of `stages`; else None.

    A sum is completed on a rank that holds the stage. A received sum was completed elsewhere, except for the gradients
    of an update's only micro-batch, which come to an owner that does not compute.
    """
    if action.op.is_message and schedule.sizes.summed > 1:  # skips most actions of a large program
        return None
    for value in action.writes[-1:]:  # a sum is written last: see `with_sum`
        if value.stage in stages and (version := made_from(schedule, value)) is not None:
            return version if action.rank in schedule.placement.holders(value.stage) else None
    return None


def update_at_once(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Update each of `stages` as soon as its sum is complete and the version before exists, where the sum is completed.

    Sums of single pushes may overtake each other.
    """
    computed = (action.micro_batch for actions in slots for action in actions if action.op.is_compute)
    first = 1 + min(computed, default=0) // schedule.sizes.summed
    complete: set[tuple[int, int, int]] = set()
    made: Counter[tuple[int, int]] = Counter()
    found: Slots = []
    for actions in slots:
        found.append([])
        for action in actions:
            found[-1].append(action)
            if (version := completed(action, schedule, stages)) is not None:
                rank, stage = action.rank, action.stage
                complete.add((rank, stage, version))
                while (rank, stage, following := first + made[rank, stage]) in complete:
                    made[rank, stage] += 1
                    found[-1].append(update(schedule, stage, following, rank))
    return found


def update_before_reads(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Update each of `stages`, on every rank where its sum is completed, at the end of the slot before the first read.

    So no rank keeps an old version longer than it reads it, and a rank waits for a sum as late as it can. Versions that
    nothing reads in this run are made in one more slot.
    """
    open_sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    found: Slots = []
    for actions, following in zip_longest(slots, slots[1:], fillvalue=()):
        for action in actions:
            if (version := completed(action, schedule, stages)) is not None:
                open_sums[action.rank, action.stage].append(version)
        found.append([*actions, *(update(schedule, *each) for each in due(following, open_sums))])
    rest = [update(schedule, stage, v, rank) for (rank, stage), versions in open_sums.items() for v in versions]
    return [*found, rest] if rest else found


def due(following: Iterable[Action], open_sums: dict[tuple[int, int], list[int]]) -> list[tuple[int, int, int]]:
    """Return stage, version and rank of each update that the next slot's compute needs; remove these from `open_sums`.

    `open_sums` has, by rank and stage, the versions that can be made, oldest first.
    """
    found = []
    for action in following:
        versions = open_sums.get((action.rank, action.stage)) if action.op.is_compute else None
        while versions and versions[0] <= action.version:
            found.append((action.stage, versions.pop(0), action.rank))
    return found


def put_off(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Move each ADD and UPDATE of `stages` to the end of the next slot.

    By then the values that they wait for have arrived, so no rank has to wait. An action stays in its slot if the next
    slot reads the version that it helps to make, or a later one, or if its slot is the last.
    """
    found: Slots = []
    waiting: list[Action] = []
    summed = schedule.sizes.summed
    for actions, following in zip_longest(slots, slots[1:]):
        # by stage: the last entry wins, the newest version
        read_next = dict(sorted((action.stage, action.version) for action in following or () if action.op.is_compute))
        stays: list[Action] = []
        urgent: list[Action] = []
        later: list[Action] = []
        for action in actions:
            if action.op not in (Op.ADD, Op.UPDATE) or action.stage not in stages:
                stays.append(action)
            elif following is None or -(-action.reads[-1].stop // summed) <= read_next.get(action.stage, 0):
                urgent.append(action)  # the version that it helps to make is read, or a later one
            else:
                later.append(action)
        found.append([*stays, *waiting, *urgent])
        waiting = later
    return found
