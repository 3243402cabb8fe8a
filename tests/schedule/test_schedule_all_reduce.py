"""Data parallelism by all-reduces: each rank adds its own, one collective a stage and step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import built, sent, sums_of
from written import of_rank

from cdp_repro.schedule import Op, Schedule


def texts(slots, rank):
    return [" ".join(action.label for action in actions) for actions in of_rank(slots, rank)]


def test_an_all_reduce_follows_the_backward_and_the_update_waits_until_it_is_read():
    slots, _ = built(Schedule.build("dp", 2, placement="replicated", collectives=True), 2)
    assert texts(slots, 1)[2:6] == [
        "B1.m1@v0 C g1[0:2]",
        "B0.m1@v0 C g0[0:2] U0@v1",
        "F0.m3@v1 U1@v1",
        "F1.m3@v1",
    ]


@given(n=st.integers(1, 4), c=st.integers(1, 2), k=st.integers(1, 3), r=st.integers(1, 2))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_each_rank_brings_its_own_sum_and_all_have_the_total(n, c, k, r):
    schedule = Schedule.build("dp", n, n * c, "replicated", collectives=True, accumulate=k, replicas=r)
    slots, steps = built(schedule, 3)
    ranks, M = n * r, schedule.micro_batches
    assert not sent(slots)
    brought = {}
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.COLLECTIVE:
                (own,) = action.reads
                brought[action.stage, action.value.stop // M - 1, action.rank] = list(own.members)
    if ranks > 1:
        for t, j, rank in itertools.product(range(steps), range(n * c), range(ranks)):
            assert brought.pop((j, t, rank)) == list(range(t * M + rank, t * M + M, ranks))
    assert not brought
    for j in range(n * c):
        assert sums_of(slots, j, schedule) == {
            (t, rank): list(range(t * M, t * M + M)) for t in range(steps) for rank in range(ranks)
        }


@pytest.mark.parametrize("k", [1, 2])
def test_with_accumulation_a_rank_adds_its_own_without_sending(k):
    schedule = Schedule.build("dp", 2, placement="replicated", collectives=True, accumulate=k)
    slots, _ = built(schedule, 1)
    labels = [str(a) for actions in of_rank(slots, 1) for a in actions if a.op is Op.BACKWARD and a.stage == 0]
    assert labels[-1].endswith("-> g0[1:2]" if k == 1 else "g0[1:2]! -> g0[1:4:2]")
    assert sum(a.op is Op.COLLECTIVE for slot in slots for a in slot.actions) == 2 * 2
