"""Forwards of an evaluation pass the ranks one after the other, and no rank waits longer than the pipeline fills."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdp_repro.schedule import Schedule
from cdp_repro.schedule.forward_only import Hop, is_pipelined, order, path


def tasks(schedule, batches):
    return {rank: order(schedule, rank, batches) for rank in range(schedule.ranks)}


def slots(schedule, batches):
    """The slot of each task if a rank begins the next one of its order as soon as the hop before is done."""
    left, free, found = tasks(schedule, batches), [0] * schedule.ranks, {}
    while any(left.values()):
        before = len(found)
        for rank, own in left.items():
            while own and (own[0][1] == 0 or (own[0][0], own[0][1] - 1) in found):
                batch, place = own.pop(0)
                found[batch, place] = max(free[rank], found[batch, place - 1] + 1 if place else 0)
                free[rank] = found[batch, place] + 1
        assert len(found) > before, "ranks wait for each other"
    return found


def idle_share(schedule, batches):
    found = slots(schedule, batches)
    return 1 - Fraction(len(found), schedule.ranks * (1 + max(found.values())))


@st.composite
def pipelines(draw):
    ranks, chunks = draw(st.integers(2, 6), label="D"), draw(st.integers(1, 3), label="v")
    mode = draw(st.sampled_from(("cdp_v1", "gpipe", "interleaved", "chimera")))
    if mode == "chimera":
        return Schedule.build(mode, 4, 2 * chunks + 2, "pipeline", ranks=2 * chunks + 2)
    replicas = draw(st.integers(1, 2))
    return Schedule.build(mode, ranks, ranks * chunks, "pipeline", ranks=ranks, replicas=replicas)


@given(schedule=pipelines(), batches=st.integers(0, 12))
def test_every_batch_passes_every_stage_once_in_order_and_nobody_waits_for_ever(schedule, batches):
    assert is_pipelined(schedule)
    for batch in range(batches):
        hops = path(schedule, batch)
        assert [*chain(*(hop.stages for hop in hops))] == [*range(schedule.stages)]
        assert all(hop.rank in schedule.placement.holders(stage) for hop in hops for stage in hop.stages)
    done = sorted(chain(*tasks(schedule, batches).values()))
    assert done == sorted((batch, place) for batch in range(batches) for place in range(len(path(schedule, batch))))
    slots(schedule, batches)


@given(schedule=pipelines(), batches=st.integers(1, 12))
def test_messages_between_two_ranks_are_sent_and_received_in_the_same_order(schedule, batches):
    sent, received = {}, {}
    for rank, own in tasks(schedule, batches).items():
        for batch, place in own:
            hops = path(schedule, batch)
            if place + 1 < len(hops):
                sent.setdefault((rank, hops[place + 1].rank), []).append((batch, place))
            if place:
                received.setdefault((hops[place - 1].rank, rank), []).append((batch, place - 1))
    assert sent == received


@given(d=st.integers(2, 7), chunks=st.integers(1, 3), m=st.integers(1, 20))
def test_the_idle_share_of_a_pipeline(d, chunks, m):
    schedule = Schedule.build("gpipe", d, d * chunks, "pipeline", ranks=d)
    assert idle_share(schedule, m) == Fraction(d - 1, d - 1 + m)


@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (4, 12)])
def test_going_round_costs_no_more_than_chunks_of_one_rank(d, m):
    """v rounds through D ranks of stages a v-th as large: the bubble is at most that of one round."""
    looped = idle_share(Schedule.build("interleaved", d, 2 * d, "pipeline", ranks=d), m)
    assert looped <= Fraction(d - 1, d - 1 + m)


@pytest.mark.parametrize(
    ("mode", "placement", "pipelined"),
    [("cdp_v2", "model_parallel", True), ("dp", "model_parallel", True), ("cdp_v1", "pipeline", True),
     ("dp", "replicated", False), ("dp", "zero", False), ("dp", "parameter_server", False),
     ("dp", "single_device", False)],
)  # fmt: skip
def test_where_stages_are_computed_where_they_are_held(mode, placement, pipelined):
    assert is_pipelined(Schedule.build(mode, 3, placement=placement)) is pipelined


def test_replicas_take_turns_and_stages_of_a_rank_are_one_hop():
    schedule = Schedule.build("cdp_v1", 2, 4, "pipeline", ranks=2, replicas=2)
    assert path(schedule, 0) == [Hop(0, (0, 1)), Hop(2, (2, 3))]
    assert path(schedule, 1) == [Hop(1, (0, 1)), Hop(3, (2, 3))]
    assert order(schedule, 2, 3) == [(0, 1), (2, 1)]
