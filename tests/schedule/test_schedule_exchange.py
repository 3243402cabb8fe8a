"""Two holders exchange what they have, and wait for it only when they need the sum."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import built, sent, sums_of
from written import CYCLIC, of_rank, placed

from cdp_repro.schedule import Op, Schedule
from cdp_repro.schedule.summation import strategy_of
from cdp_repro.schedule.summation.exchange import only_exchanges, sum_by_exchange


@given(
    sizes=st.sampled_from([("replicated", 2, 1), ("model_parallel", 2, 1), ("model_parallel", 4, 1),
                           ("pipeline", 3, 2), ("replicated", 1, 2)]),
    c=st.integers(1, 2), mode=st.sampled_from(["dp", *CYCLIC, "matrix"]), k=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=25, deadline=None, derandomize=True)
def test_two_holders_exchange_what_they_have_and_wait_for_it_only_when_they_need_the_sum(sizes, c, mode, k):
    placement, n, r = sizes
    rule = [[1 + (2 * i + j) % 3 for j in range(c * n)] for i in range(n * k)] if mode == "matrix" else mode
    schedule = Schedule.build(rule, n, c * n, placement, replicas=r, accumulate=k)
    steps, M = 5, schedule.micro_batches
    slots, _ = built(schedule, steps)
    pairs = [j for j in range(c * n) if strategy_of(schedule, j) is sum_by_exchange]
    assert pairs == [j for j in range(c * n) if len(schedule.placement.holders(j)) == 2]
    assert pairs or (placement, n, mode) == ("model_parallel", 4, "dp")
    backwards = {(a.stage, a.micro_batch): slot for a, slot in placed(slots, Op.BACKWARD).items()}
    for j in pairs:
        holders = schedule.placement.holders(j)
        assert sums_of(slots, j, schedule) == {
            (t, r): list(range(t * M, t * M + M)) for t in range(steps) for r in holders
        }
        moved = {}
        for slot in slots:
            for action in slot.actions:
                if action.op is Op.SEND and action.value.kind == "g" and action.stage == j:
                    assert len(action.value.members) < M, "nobody waits for the other's sum"
                    moved[action.value.stop - 1] = slot.number
        expected = {m: backwards[j, m] for m in range(steps * M)
                    if schedule.placement.rank_of(m, j) != schedule.placement.rank_of(m + 1, j)
                    or (m + 1) % M == 0}  # fmt: skip
        assert moved == expected, "each gradient, or the sum up to it, leaves as soon as it is made"
        assert sum(value.startswith(f"g{j}[") for *_, value in sent(slots)) == len(expected), "once"
    for rank in range(schedule.ranks):
        actions = [a for each in of_rank(slots, rank) for a in each if not a.op.is_message]
        for action, following in pairwise(actions):
            if action.op is Op.ADD and action.stage in pairs and len(action.value.members) == M:
                assert (following.op, following.stage) in ((Op.UPDATE, action.stage), (Op.BACKWARD, action.stage))
                if following.op is Op.UPDATE:
                    assert following.version == action.value.stop // M


@pytest.mark.parametrize("mode", CYCLIC)
def test_an_exchange_is_prepared_half_a_step_ahead_where_nothing_else_is_received(mode):
    schedule = Schedule.build(mode, 2, 6, "replicated")
    assert only_exchanges(schedule)
    slots, _ = built(schedule, 4)
    where = {(a.op, a.value): slot for a, slot in placed(slots, Op.SEND, Op.RECEIVE).items()}
    ahead = {v: where[Op.SEND, v] - where[Op.RECEIVE, v] for op, v in where if op is Op.SEND}
    assert ahead == {v: schedule.stages * (v.number % 2) for v in ahead}
    assert len(ahead) == 4 * 2 * 6


@pytest.mark.parametrize("mode", CYCLIC)
def test_elsewhere_both_ends_of_an_exchange_stand_in_one_slot(mode):
    others = Schedule.build(mode, 4, placement="model_parallel")
    assert not only_exchanges(others)
    for slot in built(others, 3)[0]:
        ends = {(a.value, a.rank, a.peer) for a in slot.actions if a.op is Op.SEND}
        assert ends == {(a.value, a.peer, a.rank) for a in slot.actions if a.op is Op.RECEIVE}


def test_an_exchange_is_that_of_the_docstring():
    slots, _ = built(Schedule.build("dp", 1, 1, "replicated", replicas=2), 1)
    for rank in range(2):
        own, other = f"g0[{rank}:{rank + 1}]", f"g0[{1 - rank}:{2 - rank}]"
        labels = [a.label for each in of_rank(slots, rank) for a in each if a.op not in (Op.FORWARD, Op.RECEIVE)]
        assert labels == [f"B0.m{rank}@v0", f"S {own}>{1 - rank}", "A g0[0:2]", "U0@v1"]
        (receive,) = [a.label for each in of_rank(slots, rank) for a in each if a.op is Op.RECEIVE]
        assert receive == f"R {other}<{1 - rank}"
