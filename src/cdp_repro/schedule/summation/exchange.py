"""Two holders: each sends the other the missing part of the sum, and both complete it.

One stage and one training step of two micro-batches (r = rank):

    r0  B.m0 -> g[0:1]  S g[0:1]>1   ...   A g[0:1] + g[1:2]  U
    r1  B.m1 -> g[1:2]  S g[1:2]>0   ...   A g[0:1] + g[1:2]  U

The sums have the same members in the same order, so both are bitwise the same, and neither rank waits for the other's
total. Partial sums of earlier micro-batches are relayed, as between three or more holders.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdp_repro.schedule.actions import Action, Op, send
from cdp_repro.schedule.meaning import addition
from cdp_repro.schedule.passes.placing import Slots
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.summation.common import completed, members_with, replace_backwards, update_before_reads
from cdp_repro.schedule.summation.relay import relayed_sum
from cdp_repro.schedule.values import gradient_sum


def is_exchangeable(schedule: Schedule, stage: int) -> bool:
    """Whether two ranks hold a stage, and each computes one of the last two micro-batches of every training step."""
    rank_of, number = schedule.placement.rank_of, schedule.micro_batches
    lasts = (number - 1, 2 * number - 1)
    is_split = number > 1 and all(rank_of(m, stage) != rank_of(m - 1, stage) for m in lasts)
    return is_split and len(schedule.placement.holders(stage)) == 2


def only_exchanges(schedule: Schedule) -> bool:
    """Whether ranks send nothing but exchanges: two ranks, each with one micro-batch for all stages."""
    if schedule.micro_batches != 2 or schedule.ranks != 2 or schedule.lent or schedule.spec.collectives:
        return False
    return all(len({schedule.placement.rank_of(m, stage) for stage in range(schedule.stages)}) == 1 for m in range(2))


def sum_by_exchange(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Exchange the last two summands of each sum; add them as late as possible, and update before the first read."""
    receives_early = only_exchanges(schedule)
    slots = replace_backwards(slots, stages, lambda backward: _exchanged(backward, schedule, receives_early))
    return _add_late(update_before_reads(slots, schedule, stages), schedule, stages)


def _exchanged(backward: Action, schedule: Schedule, receives_early: bool) -> Iterator[Action]:
    """Yield a backward with its ADDs and messages.

    A rank that does nothing but exchange may be a little behind the other. So it posts its receive when it sends its
    own summand, perhaps before the slot in which the other sends: gloo moves nothing before the receiver is ready.
    """
    m, stage, rank = backward.micro_batch, backward.stage, backward.rank
    members, rank_of = members_with(schedule, m), schedule.placement.rank_of
    computed, *relayed = relayed_sum(backward, schedule)
    yield computed
    if m == members[-1]:
        own, other = gradient_sum(stage, (m,)), rank_of(m - 1, stage)
        hand_back, receive = send(own, rank, other)
        yield hand_back
        if not receives_early:
            yield receive
        yield addition(gradient_sum(stage, members), other)
    yield from relayed
    if m == members[-2] and receives_early:
        yield send(gradient_sum(stage, (m + 1,)), rank_of(m + 1, stage), rank)[1]


def _add_late(slots: Slots, schedule: Schedule, stages: frozenset[int]) -> Slots:
    """Complete a sum only when the update needs it, or when the next backward of its stage begins another sum.

    So ranks wait for a slow link as late as one open sum per stage allows.
    """
    waiting: dict[tuple[int, int], tuple[int, Action]] = {}
    found: Slots = []
    for actions in slots:
        found.append([])
        for action in actions:
            place = (action.rank, action.stage)
            if action.op is Op.ADD and (version := completed(action, schedule, stages)) is not None:
                waiting[place] = version, action
                continue
            if place in waiting and (
                action.op.gives_gradients or (action.op, action.version) == (Op.UPDATE, waiting[place][0])
            ):
                found[-1].append(waiting.pop(place)[1])
            found[-1].append(action)
    return found
