"""The min-max partition against brute force over every way to cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.partition import imbalance, partition

repeatable = settings(derandomize=True, deadline=None, max_examples=200)
whole_costs = st.lists(st.integers(0, 9), min_size=1, max_size=8)
float_costs = st.lists(st.floats(0, 1e12, allow_nan=False), min_size=1, max_size=12)


def stage_costs(costs, runs):
    return [sum(costs[block] for block in run) for run in runs]


def every_partition(blocks, stages):
    for inner in combinations(range(1, blocks), stages - 1):
        yield [range(start, stop) for start, stop in pairwise((0, *inner, blocks))]


def worth(costs, runs):
    """What `partition` promises to minimise: maximum, then sum of squares, then the last stages as late as possible."""
    sums = stage_costs(costs, runs)
    return max(sums), sum(cost * cost for cost in sums), [-run.start for run in reversed(runs)]


@repeatable
@given(whole_costs, st.data())
def test_is_the_best_of_all_partitions(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    best = min(every_partition(len(costs), stages), key=lambda runs: worth(costs, runs))
    assert partition(costs, stages) == best


@repeatable
@given(float_costs, st.data())
def test_runs_cover_the_blocks_in_order(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    runs = partition(costs, stages)
    assert len(runs) == stages
    assert all(len(run) > 0 for run in runs)
    assert [block for run in runs for block in run] == list(range(len(costs)))


@repeatable
@given(float_costs, st.integers(-20, 20), st.data())
def test_the_unit_of_the_costs_does_not_matter(costs, exponent, data):
    costs = [cost if cost > 1e-200 else 0.0 for cost in costs]  # scaling must not underflow
    stages = data.draw(st.integers(1, len(costs)))
    assert partition([cost * 2.0**exponent for cost in costs], stages) == partition(costs, stages)


def test_rounding_does_not_decide():
    # In floating point 0.1 + 0.2 > 0.3; as the exact numbers that these floats are, 0.3 is the smaller of the two.
    assert partition([0.1, 0.2, 0.3], 2) == [range(2), range(2, 3)]
    # 1e16 + 1 rounds to 1e16; exactly, the small block belongs on the other side.
    assert partition([1e16, 1.0, 1e16 - 2], 2) == [range(1), range(1, 3)]
    assert partition([1e16 - 2, 1.0, 1e16], 2) == [range(2), range(2, 3)]


def test_the_maximum_comes_before_evenness():
    # 6 + 2 + 3 has the smaller sum of squares (49), 1 + 5 + 5 (51) the smaller maximum.
    assert partition([1, 5, 2, 3], 3) == [range(1), range(1, 2), range(2, 4)]


def test_among_optimal_cuts_the_most_even_one():
    # The 9 fixes the maximum; what is left is cut 2 + 2, not 3 + 1.
    assert partition([9, 1, 1, 1, 1], 3) == [range(1), range(1, 3), range(3, 5)]


def test_equally_even_cuts_are_made_late():
    assert partition([1, 1, 1], 2) == [range(2), range(2, 3)]
    assert partition([0, 0, 0, 0], 2) == [range(3), range(3, 4)]


@pytest.mark.parametrize(("blocks", "stages"), [(3, 4), (3, 0), (1, 2)])
def test_impossible_numbers_of_stages(blocks, stages):
    with pytest.raises(ValueError, match=rf"{blocks} blocks .* stages={stages}: .* between 1 and {blocks}$"):
        partition([1.0] * blocks, stages)


def test_no_blocks():
    with pytest.raises(ValueError, match=r"0 blocks .* stages=1"):
        partition([], 1)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_costs(bad):
    with pytest.raises(ValueError, match="cost of block 1 is"):
        partition([1.0, bad, 1.0], 2)


@pytest.mark.parametrize(
    ("costs", "expected"), [([2, 2, 2], 1.0), ([3, 1], 1.5), ([4, 0, 0, 0], 4.0), ([0, 0], 1.0), ([7], 1.0)]
)
def test_imbalance(costs, expected):
    assert imbalance(costs) == expected


def test_imbalance_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        imbalance([])
