"""Sums grow along the micro-batches' ranks, and totals go from holder to holder in the order of their need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import built, sent, sums_of
from written import CYCLIC, schedules

from cdp_repro.schedule import Op, Schedule, Value
from cdp_repro.schedule.summation import strategy_of
from cdp_repro.schedule.summation.relay import order_of_need, sum_by_relay


def hops_of(slots, stage, version, micro_batches):
    """(slot, source, destination) of each message with the sum from which a version is made."""
    total = str(Value("g", stage, (version - 1) * micro_batches, stop=version * micro_batches))
    return [(slot, source, destination) for slot, source, destination, value in sent(slots) if value == total]


@given(schedules(placements=("replicated", "model_parallel", "pipeline")))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_each_holder_has_the_same_total_by_one_message_a_hop(schedule):
    steps, M, rank_of = 3, schedule.micro_batches, schedule.placement.rank_of
    slots, _ = built(schedule, steps)
    for j in (j for j in range(schedule.stages) if strategy_of(schedule, j) is sum_by_relay):
        holders = schedule.placement.holders(j)
        assert sums_of(slots, j, schedule) == {
            (t, r): list(range(t * M, t * M + M)) for t in range(steps) for r in holders
        }
        moved = [(a, b, value) for _, a, b, value in sent(slots) if value.startswith(f"g{j}[")]
        partial = [
            (rank_of(m, j), rank_of(m + 1, j), f"g{j}[{m // M * M}:{m + 1}]")
            for m in range(steps * M) if (m + 1) % M and rank_of(m, j) != rank_of(m + 1, j)
        ]  # fmt: skip
        totals = []
        for version in range(1, steps + 1):
            at, need = rank_of(version * M - 1, j), order_of_need(schedule, j, version)
            assert sorted(need) == list(holders)
            for rank in [rank for rank in need if rank != at]:
                totals.append((at, rank, f"g{j}[{(version - 1) * M}:{version * M}]"))
                at = rank
        assert sorted(moved) == sorted(partial + totals)


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("mode", CYCLIC)
def test_the_total_is_relayed_in_the_order_of_need(n, mode):
    """design.md, section 3: with cdp_v2 N-1-j, N-j, ..., N-2, then 0, 1, ...; with cdp_v1 0, 1, ..., N-2."""
    slots, _ = built(Schedule.build(mode, n, placement="replicated"), 6)
    for j in range(n):
        hops = hops_of(slots, j, 3, n)
        fresh = range(n - 1 - j, n - 1) if mode == "cdp_v2" else range(0)
        stale = [rank for rank in range(n - 1) if rank not in fresh]
        assert [destination for _, _, destination in hops] == [*fresh, *stale]
        assert [source for _, source, _ in hops] == [n - 1, *(destination for _, _, destination in hops[:-1])]
        step = 2
        complete = 2 * n * step + 4 * n - 3 - j
        need = {i: 2 * n * (step + (1 if i in fresh else 2)) + 2 * i + j for i in range(n - 1)}
        latest = {destination: need[destination] - 1 for _, _, destination in hops}  # a rank updates then
        assert all(slot <= latest[destination] for slot, _, destination in hops), "there when it is needed"
        assert all(slot > latest[source] for slot, source, _ in hops[1:]), "nobody waits for a sum it only hands on"
        assert [slot for slot, _, destination in hops if destination in fresh] == [latest[i] for i in fresh]
        if mode == "cdp_v1":
            assert [slot for slot, _, _ in hops] == [complete, *(need[i] for i in range(n - 2))], (
                "as early as that allows"
            )
        if fresh:
            assert hops[0][0] == complete, "worker N-1-j needs it in the very next slot"


def test_the_order_of_need_begins_with_who_reads_fresh():
    schedule = Schedule.build("cdp_v2", 4, placement="replicated")
    orders = [order_of_need(schedule, stage, 5) for stage in range(4)]
    assert orders == [(3, 0, 1, 2), (2, 3, 0, 1), (1, 2, 3, 0), (0, 1, 2, 3)]
    stale = Schedule.build("cdp_v1", 4, placement="replicated")
    assert {order_of_need(stale, stage, version) for stage in range(4) for version in (1, 2, 7)} == {(0, 1, 2, 3)}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("mode", CYCLIC)
def test_with_accumulation_the_sum_goes_round_k_times_and_the_total_once(mode, k):
    n = 3
    slots, _ = built(Schedule.build(mode, n, placement="replicated", accumulate=k), 4)
    for j in range(n):
        mine = [(a, b) for _, a, b, value in sent(slots) if Value.parse(value) in _partials(j, 2, n * k)]
        assert mine == [(m % n, (m + 1) % n) for m in range(n * k - 1)]
        assert len(hops_of(slots, j, 3, n * k)) == n - 1


def _partials(stage, step, micro_batches):
    first = step * micro_batches
    return [Value("g", stage, first, stop=m + 1) for m in range(first, first + micro_batches - 1)]


@given(n=st.integers(3, 5), c=st.integers(1, 2), data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_sums_that_can_wait_leave_the_links_to_those_that_cannot(n, c, data):
    """Under any bounded staleness, early sums bring no rank a second one in a slot; only urgent ones may."""
    rule = [[data.draw(st.integers(1, 3)) for _ in range(c * n)] for _ in range(n)]
    slots, _ = built(Schedule.build(rule, n, c * n, "replicated"), 6)
    updates = {(a.rank, a.stage, a.version): slot.number for slot in slots for a in slot.actions if a.op is Op.UPDATE}
    for end in (1, 2):
        per_place = {}
        for hop in sent(slots):
            value = Value.parse(hop[3])
            if len(value.members) == n:
                is_urgent = hop[0] == updates[hop[2], value.stage, value.stop // n]
                per_place.setdefault((hop[0], hop[end]), []).append(is_urgent)
        assert all(len(found) - sum(found) <= 1 for found in per_place.values())
        assert all(all(found) for found in per_place.values() if len(found) > 1), "a sum that could wait is in the way"
