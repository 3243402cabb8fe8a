"""The two one-sided tests, and the verdicts that follow from them by rule."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from cdp_repro.report.groups import Difference
from cdp_repro.report.two_one_sided import (
    BETTER,
    EQUIVALENT,
    NOT_SETTLED,
    WORSE,
    equivalence,
    holm,
    power_without_difference,
)


def by_seed(values):
    return dict(enumerate(values))


ZERO = by_seed([90.0] * 5)


@pytest.mark.parametrize(
    ("differences", "more", "less"),
    [
        ([0.01, -0.02, 0.03, 0.0, -0.01], EQUIVALENT, EQUIVALENT),
        ([-0.11, -0.1, -0.09, -0.1, -0.1], EQUIVALENT, EQUIVALENT),  # surely lower, and surely by less than the margin
        ([-1.0, -1.1, -0.9, -1.0, -1.05], WORSE, BETTER),
        ([1.0, 1.1, 0.9, 1.0, 1.05], BETTER, WORSE),
        ([-1.0, 1.0, -0.9, 0.8, 0.2], NOT_SETTLED, NOT_SETTLED),
        ([0.3, 0.301, 0.299, 0.3001, 0.2999], BETTER, WORSE),  # at the margin is not inside
    ],
)
def test_verdicts(differences, more, less):
    ours = {seed: ZERO[seed] + each for seed, each in enumerate(differences)}
    for more_is_better, verdict in ((True, more), (False, less)):
        assert equivalence(Difference.paired(ours, ZERO), 0.3, more_is_better).verdict == verdict


@pytest.mark.parametrize("each", [-1.0, 0.0, 0.1])
def test_equal_differences_show_no_spread_and_settle_nothing(each):
    """Coarse numbers give them by chance; an interval of width 0 would be sure of them."""
    theirs = {0: 80.1, 1: 3.7, 2: 81.3}  # whose differences are equal but for rounding
    found = equivalence(Difference.paired({seed: value + each for seed, value in theirs.items()}, theirs), 0.3, True)
    assert found.verdict == NOT_SETTLED and math.isnan(found.p_value)
    assert found.difference.text() == f"{each:+.2f} (3)"


def test_p_is_the_larger_of_the_two_one_sided_t_tests():
    differences = [0.21, -0.05, 0.13, 0.02, 0.11, 0.08]
    found = equivalence(Difference.paired(by_seed(differences), by_seed([0.0] * 6)), 0.3, True)
    lower = stats.ttest_1samp(differences, -0.3, alternative="greater").pvalue
    upper = stats.ttest_1samp(differences, 0.3, alternative="less").pvalue
    assert found.p_value == pytest.approx(max(lower, upper))
    half = stats.t.ppf(0.95, 5) * statistics.stdev(differences) / math.sqrt(6)
    inside = abs(statistics.fmean(differences)) + half < 0.3
    assert (found.verdict == EQUIVALENT) == inside, "the same as the 90 % interval inside the margin"


@pytest.mark.parametrize("ours", [{3: 91.0}, {3: 91.0, 4: math.inf}, {3: 91.0, 4: math.nan}])
def test_one_seed_and_what_is_not_finite_settle_nothing(ours):
    found = equivalence(Difference.paired(ours, {3: 90.0, 4: 90.0}), 0.3, True)
    assert found.verdict == NOT_SETTLED and math.isnan(found.p_value)


@pytest.mark.parametrize("deviation", [0.25, 0.33, 0.47])
def test_power_is_how_often_seeds_that_do_not_differ_are_found_equivalent(deviation):
    found = Difference(-0.1, -1.0, 1.0, 0.5, 10, deviation / math.sqrt(10))
    draws = np.random.default_rng(0).normal(0.0, deviation, (40_000, 10))
    half = stats.t.ppf(0.95, 9) * draws.std(axis=1, ddof=1) / math.sqrt(10)
    passing = np.mean(np.abs(draws.mean(axis=1)) + half < 0.3)
    assert power_without_difference(found, 0.3) == pytest.approx(passing, abs=0.01)
    assert 0.1 < passing < 0.99, "the cases tell powers apart"


def test_without_an_interval_there_is_no_power():
    assert math.isnan(power_without_difference(Difference.paired({0: 1.0}, {0: 0.9}), 0.3))


def test_holm_corrects_for_the_number_of_tests():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]), "times 3, 2, 1 by rank, never below a smaller"
    assert holm([0.8, 0.019, 0.41]) == pytest.approx([0.82, 0.057, 0.82])
    assert holm([]) == [] and holm([0.6, 0.7]) == [1.0, 1.0]


def test_a_difference_without_an_interval_shows_no_power():
    assert math.isnan(power_without_difference(Difference(0.1, math.nan, math.nan, math.nan, 10), 0.3))
