"""What collectives cost as rings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import Action, Op, Value
from cdp_repro.schedule.values import collective_name
from cdp_repro.trace.rings import next_in_ring, ring_bytes, ring_hops

REDUCE, SCATTER, GATHER = "g2[4:8]", "g2[4:8]#2/4", "pf2.m5@v3"


def part(value, rank=1):
    return Action(Op.COLLECTIVE, rank, 2, value=Value.parse(value))


@given(size=st.integers(0, 10**6), ranks=st.integers(1, 50))
@settings(derandomize=True)
def test_all_ranks_together_send_all_but_one_part_once_or_twice(size, ranks):
    for value, times in ((REDUCE, 2), (GATHER, 1), (SCATTER, 1)):
        sent = [ring_bytes(part(value, rank), size, ranks) for rank in range(ranks)]
        assert sum(sent) == times * size * (ranks - 1)
        assert max(sent) - min(sent) <= times
    assert [next_in_ring(rank, ranks) for rank in range(ranks)] == [*range(1, ranks), 0]


@pytest.mark.parametrize(("value", "hops"), [(REDUCE, 6), (SCATTER, 3), (GATHER, 3)])
def test_a_ring_of_four_hands_on_three_times_a_round(value, hops):
    assert ring_hops(part(value), 4) == hops


def test_ranks_take_part_in_one_collective_with_values_of_their_own():
    def name(text):
        return collective_name(Value.parse(text))

    assert name("pf2.m5@v3") == name("pf2.m6@v3") != name("pb2.m5@v3")
    assert name("g2[4:8]#1/4") == name("g2[4:8]#4/4") != name("g2[4:8]")
    assert len({name(text) for text in ("pf2.m5@v3", "pf2.m5@v4", "pf1.m5@v3", "g2[0:4]", "g2[4:8]")}) == 5
