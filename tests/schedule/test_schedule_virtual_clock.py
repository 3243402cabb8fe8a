"""The order of pushes: a round of the virtual clock is what a simulation event by event repeats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_servers import pushes

from cdp_repro.schedule.virtual_clock import Round, durations_of

speeds = st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=5)
seeds = st.none() | st.integers(0, 50)


def of_round(each, durations, slack, rounds):
    """The turns of some rounds, as `pushes` has them, but for the ticks before the first."""
    size = len(each.turns)
    return [
        (turn.worker, turn.begin + t * each.ticks, turn.end + t * each.ticks, turn.seen + t * size)
        for t in range(rounds)
        for turn in each.turns
    ]


@given(speeds, seeds, st.none() | st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rounds_are_what_the_events_settle_to(of_workers, jitter, slack):
    durations = durations_of(of_workers, jitter)
    each = Round.of(durations, slack)
    size = len(each.turns)
    naive = pushes(durations, slack, 30 * size + 40)
    shown = of_round(each, durations, slack, 3)
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


@given(speeds, seeds)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_without_a_bound_every_round_is_that_of_the_start(of_workers, jitter):
    """Nothing is left out at the start: a pull of the first round that would see less than nothing sees nothing."""
    durations = durations_of(of_workers, jitter)
    each = Round.of(durations)
    size = len(each.turns)
    assert size == sum(of_workers) // math.gcd(*of_workers) * len(durations[0])
    found = [(w, b, e, max(0, seen)) for w, b, e, seen in of_round(each, durations, None, 4)]
    assert found == pushes(durations, None, 4 * size)


@given(speeds, seeds, st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_worker_starts_further_ahead_than_the_bound(of_workers, jitter, slack):
    durations = durations_of(of_workers, jitter)
    each = Round.of(durations, slack)
    turns = of_round(each, durations, slack, 6)
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
    each = Round.of(durations_of([1, 1, 1, 2]), slack=0)
    assert each.ticks == 2 and [turn.worker for turn in each.turns] == [3, 0, 1, 2]
    assert [number - turn.seen for number, turn in enumerate(each.turns)] == [0, 1, 2, 3]


@given(speeds, st.integers(1, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_with_constant_speeds_any_bound_above_zero_ends_in_the_same_rounds(of_workers, slack):
    """The same worker misses as many pushes, whichever of them a round begins with."""
    durations = durations_of(of_workers)
    each, least = Round.of(durations, slack), Round.of(durations, 1)
    late = [sorted((t.worker, m - t.seen) for m, t in enumerate(one.turns)) for one in (each, least)]
    assert late[0] == late[1] and each.ticks == least.ticks == max(map(sum, durations))
    assert max(number - turn.seen for number, turn in enumerate(each.turns)) <= len(of_workers) - 1


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("slack", [None, 1, 3])
def test_workers_of_one_speed_miss_the_pushes_of_all_others(n, slack):
    each = Round.of(durations_of([1] * n), slack)
    assert each.ticks == 1 and [number - turn.seen for number, turn in enumerate(each.turns)] == [n - 1] * n


@given(speeds, st.integers(0, 50))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_jitter_changes_single_times_and_not_their_sum(of_workers, seed):
    even, uneven = durations_of(of_workers), durations_of(of_workers, seed)
    for (ticks,), drawn in zip(even, uneven, strict=True):
        assert sum(drawn) == 4 * ticks * len(drawn)
        assert all(2 * ticks <= each <= 6 * ticks for each in drawn)
    assert uneven == durations_of(of_workers, seed)
