"""The order of pushes: a round of the virtual clock is what a simulation event by event repeats."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_servers import pushes

from cdp_repro.schedule.virtual_clock import Round, ticks_of

speeds = st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=5)
seeds = st.none() | st.integers(0, 50)
message_times = st.sampled_from([0, 0.5, 1])


def of_round(each, rounds):
    """The turns of some rounds, as `pushes` has them, but for the ticks before the first."""
    size = len(each.turns)
    return [
        (turn.worker, turn.begin + t * each.ticks, turn.end + t * each.ticks, turn.seen + t * size)
        for t in range(rounds)
        for turn in each.turns
    ]


@given(speeds, seeds, message_times, st.none() | st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rounds_are_what_the_events_settle_to(of_workers, jitter, message_time, slack):
    ticks = ticks_of(of_workers, jitter, message_time)
    each = Round.for_workers(ticks, slack)
    size = len(each.turns)
    naive = pushes(ticks, slack, 30 * size + 40)
    shown = of_round(each, 3)
    begins = [
        start
        for start in range(len(naive) - 3 * size)
        if all(
            (a[0], a[1] - naive_start, a[2] - naive_start, a[3] - start) == b
            for naive_start in [naive[start][1] - shown[0][1]]
            for a, b in zip(naive[start : start + 3 * size], shown, strict=True)
        )
    ]
    assert begins, "the events never do what the round says"
    assert begins[-1] - begins[0] >= size  # and again and again
    assert sum(turn.seen <= number for number, turn in enumerate(each.turns)) == size


@given(speeds, seeds, message_times)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_without_a_bound_every_round_is_that_of_the_start(of_workers, jitter, message_time):
    """Nothing is left out at the start: a pull of the first round that would see less than nothing sees nothing."""
    ticks = ticks_of(of_workers, jitter, message_time)
    each = Round.for_workers(ticks)
    size = len(each.turns)
    turns = len(ticks.durations[0])
    cycles = [sum(each) + turns * 2 * ticks.message for each in ticks.durations]
    assert size == sum(turns * math.lcm(*cycles) // cycle for cycle in cycles)
    found = [(w, b, e, max(0, seen)) for w, b, e, seen in of_round(each, 4)]
    assert found == pushes(ticks, None, 4 * size)


@given(speeds, seeds, message_times, st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_worker_starts_further_ahead_than_the_bound(of_workers, jitter, message_time, slack):
    ticks = ticks_of(of_workers, jitter, message_time)
    each = Round.for_workers(ticks, slack)
    turns = of_round(each, 6)
    workers = [turn.worker for turn in each.turns]
    assert len({workers.count(one) for one in workers}) == 1  # bounded, nobody is faster than the slowest for ever
    leads = {one: set() for one in workers}
    for worker, _, _, seen in turns:
        visible = [one[0] for one in turns[: max(0, seen)]]
        if len(visible) >= len(workers):
            leads[worker].add(visible.count(worker) - min(map(visible.count, leads)))
    # rounds begin with workers apart by no more than the bound, which is not counted here
    assert all(max(found) - min(found) <= slack for found in leads.values())


def test_bounds_of_zero_make_all_wait_for_the_slowest():
    each = Round.for_workers(ticks_of([1, 1, 1, 2]), slack=0)
    assert each.ticks == 2 and [turn.worker for turn in each.turns] == [3, 0, 1, 2]
    assert [number - turn.seen for number, turn in enumerate(each.turns)] == [0, 1, 2, 3]


@given(speeds, st.integers(1, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_with_constant_speeds_any_bound_above_zero_ends_in_the_same_rounds(of_workers, slack):
    """The same worker misses as many pushes, whichever of them a round begins with."""
    ticks = ticks_of(of_workers)
    each, least = Round.for_workers(ticks, slack), Round.for_workers(ticks, 1)
    late = [sorted((t.worker, m - t.seen) for m, t in enumerate(one.turns)) for one in (each, least)]
    assert late[0] == late[1] and each.ticks == least.ticks == max(map(sum, ticks.durations))
    assert max(number - turn.seen for number, turn in enumerate(each.turns)) <= len(of_workers) - 1


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("slack", [None, 1, 3])
def test_workers_of_one_speed_miss_the_pushes_of_all_others(n, slack):
    each = Round.for_workers(ticks_of([1] * n), slack)
    assert each.ticks == 1 and [number - turn.seen for number, turn in enumerate(each.turns)] == [n - 1] * n


@given(speeds, st.integers(0, 50))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_jitter_changes_single_times_and_not_their_sum(of_workers, seed):
    even, uneven = ticks_of(of_workers), ticks_of(of_workers, seed)
    for (ticks,), drawn in zip(even.durations, uneven.durations, strict=True):
        assert sum(drawn) == 4 * ticks * len(drawn)
        assert all(2 * ticks <= each <= 6 * ticks for each in drawn)
    assert uneven == ticks_of(of_workers, seed)


def test_messages_make_workers_of_different_speeds_more_alike():
    """Turns of 2 ticks and of 1 become turns of 4 and of 3 where messages take a tick each."""
    assert [Round.for_workers(ticks_of([1, 2], None, m)).ticks for m in (0, 1)] == [2, 12]
    shares = []
    for message_time in (0, 0.5, 1, 3):
        workers = [turn.worker for turn in Round.for_workers(ticks_of([1, 2], None, message_time)).turns]
        shares.append(workers.count(1) / len(workers))
    assert shares == sorted(shares, reverse=True) and shares[0] == 2 / 3 and shares[-1] < 0.55


@given(speeds, seeds, message_times)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_messages_take_their_share_of_a_turn(of_workers, jitter, message_time):
    ticks = ticks_of(of_workers, jitter, message_time)
    fastest = min(map(fmean, ticks.durations))
    assert ticks.message == pytest.approx(message_time * fastest)
    for turn in Round.for_workers(ticks).turns:
        assert turn.end == turn.begin + turn.computing + 2 * ticks.message
        assert turn.computing in ticks.durations[turn.worker]
