"""Three or more holders: a sum grows along the ranks of the micro-batches, and the total goes from holder to holder.

Workers 0, 1, 2 on ranks of their own, one stage and one training step (r = rank):

    r0  B.m0 -> g[0:1]  S>1                                  U  (total from r2)
    r1        B.m1 + g[0:1] -> g[0:2]  S>2                        U  (total from r0)
    r2                 B.m2 + g[0:2] -> g[0:3] = total  S>0  U

A rank needs the total only when it first reads the version made from it. So the total visits the holders in the order
in which they need it. The rank that completes it sends it at once; each of the others hands it on after its update. No
rank keeps an old version longer than it reads it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, zip_longest

from cdp_repro.schedule.actions import Action, send
from cdp_repro.schedule.meaning import addition, total_of, update, with_sum
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import completed, due, members_with, replace_backwards
from cdp_repro.schedule.values import gradient_sum


def sum_by_relay(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Relay partial sums along the micro-batches, and totals along the holders in the order in which they need them."""
    slots = replace_backwards(slots, stages, lambda backward: relayed_sum(backward, schedule))
    return _relay_totals(slots, schedule, stages)


def relayed_sum(backward: Action, schedule: Schedule) -> Iterator[Action]:
    """Yield a backward of the relay of partial sums, with its ADD and its message if it needs them."""
    m, stage, rank = backward.micro_batch, backward.stage, backward.rank
    members, rank_of = members_with(schedule, m), schedule.placement.rank_of
    after = gradient_sum(stage, range(members[0], m + 1))
    if m == members[0] or rank_of(m - 1, stage) == rank:
        yield with_sum(backward, after)
    else:
        yield with_sum(backward, gradient_sum(stage, (m,)))
        yield addition(after, rank)
    if m < members[-1] and (following := rank_of(m + 1, stage)) != rank:
        yield from send(after, rank, following)


def order_of_need(schedule: Schedule, stage: int, version: int) -> tuple[int, ...]:
    """Return the holders of `stage` in the order in which they first read `version` >= 1, or a later one.

    For example, on stage 1 of cdp_v2 with N = S = 4, workers 2 and 3 read the new version, and 0 and 1 a step later.
    """
    found: dict[int, None] = {}
    readers = (m for m in count(version * schedule.micro_batches) if schedule.rule.version(m, stage) >= version)
    while len(found) < len(schedule.placement.holders(stage)):
        found[schedule.holder_read(next(readers), stage)] = None
    return tuple(found)


class _Total:
    """The path of one total from holder to holder."""

    def __init__(self, stage: int, version: int, need: Sequence[int], at: int, ready: int) -> None:
        """`need` has the holders in the order in which they need the total; rank `at` completes it in slot `ready`."""
        self.stage, self.version = stage, version
        self.updating = [*need]
        """The holders that have still to update, in the order of their need."""
        self.waiting = deque(rank for rank in need if rank != at)
        """Those of them that the total has still to reach."""
        self.at = at
        """The rank that hands the total on next: at first the one that completes it."""
        self.ready: int | None = ready
        """The slot in which that rank completed the total, or updated with it; None if it has not yet."""

    def is_ready(self, before: int) -> bool:
        """Whether the total could be handed on before the compute of slot `before`."""
        return self.ready is not None and self.ready < before

    def can_leave(self, slot: int) -> bool:
        """Whether the total can leave in a slot: ready before, or completed there; not if updated with there."""
        return self.is_ready(slot) or (self.ready == slot and self.at in self.updating)

    def hand_on(self, schedule: Schedule) -> tuple[Action, Action]:
        """Return the message that takes the total to the next holder."""
        source, self.at, self.ready = self.at, self.waiting.popleft(), None
        return send(total_of(schedule, self.stage, self.version), source, self.at)

    def update(self, schedule: Schedule, rank: int, slot: int) -> Action:
        """Return the update of `rank` with the total in `slot`, after which the rank can hand it on."""
        self.updating.remove(rank)
        if rank == self.at and self.waiting:
            self.ready = slot
        return update(schedule, self.stage, self.version, rank)


_Totals = dict[tuple[int, int], _Total]
"""By stage and version, in the order in which they were completed."""


def _relay_totals(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Hand the totals on; each holder updates at the end of the slot before its first read.

    Per slot, a rank sends and receives at most one total, unless the next slot needs more; totals that can wait give
    way. After the last slot, the totals reach the remaining holders.
    """
    totals: _Totals = {}
    open_sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    found: Slots = []
    for number, (actions, following) in enumerate(zip_longest(slots, slots[1:], fillvalue=())):
        for action in actions:
            if (version := completed(action, schedule, stages)) is not None:
                need = order_of_need(schedule, action.stage, version)
                totals[action.stage, version] = _Total(action.stage, version, need, action.rank, number)
                for rank in need:
                    open_sums[rank, action.stage].append(version)
        early, late = _handed_on(totals, schedule, due(following, open_sums), number)
        found.append([*early, *actions, *late])
    while totals:
        oldest = dict(sorted(totals, reverse=True))  # by stage: the last entry wins, its oldest version
        reads = [(stage, version, totals[stage, version].updating[0]) for stage, version in sorted(oldest.items())]
        early, late = _handed_on(totals, schedule, reads, len(found))
        found.append([*early, *late])
    return found


def _handed_on(
    totals: _Totals, schedule: Schedule, reads: Iterable[tuple[int, int, int]], slot: int
) -> tuple[list[Action], list[Action]]:
    """Return the actions of `slot` before and after its compute, and drop the totals that are done."""
    early: list[Action] = []
    late: list[Action] = []
    senders: set[int] = set()
    receivers: set[int] = set()

    def hand_on(total: _Total) -> None:
        senders.add(total.at)
        receivers.add(total.waiting[0])
        (early if total.is_ready(before=slot) else late).extend(total.hand_on(schedule))

    for stage, version, rank in reads:
        total = totals[stage, version]
        while rank in total.waiting:
            hand_on(total)
        late.append(total.update(schedule, rank, slot))
    for total in totals.values():
        if total.waiting and total.at not in senders and total.waiting[0] not in receivers and total.can_leave(slot):
            hand_on(total)
    for key in [key for key, total in totals.items() if not total.updating]:
        del totals[key]
    return early, late
