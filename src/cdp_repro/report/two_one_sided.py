"""Whether two groups of runs are equivalent: two one-sided tests with a margin that was stated before the runs.

Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability", J. Pharmacokinetics and Biopharmaceutics 15 (1987).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.special import chdtri, ndtr, stdtr, stdtrit

from cdp_repro.report.groups import Difference

LEVEL = 0.05
"""Level of each one-sided test: both reject exactly if the 90 % interval lies inside the margin."""

EQUIVALENT, WORSE, BETTER, NOT_SETTLED = "equivalent", "worse", "better", "not settled"


@dataclass(frozen=True)
class Equivalence:
    """How one group compares with another, seed by seed."""

    difference: Difference
    p_value: float
    """The larger of the two one-sided tests; NaN where the difference has no interval."""
    verdict: str
    """`equivalent`: surely less than the margin apart. Else `worse` or `better`: the 95 % interval lies on one side of
    0. Else `not settled`: more seeds would be needed."""


def equivalence(difference: Difference, margin: float, more_is_better: bool) -> Equivalence:
    """Return what a difference of two groups shows; `margin` is in its unit."""
    p_value = _p_value(difference, margin)
    return Equivalence(difference, p_value, _verdict(difference, p_value, more_is_better))


def power_without_difference(difference: Difference, margin: float) -> float:
    """Return how probably as many seeds are found equivalent if there is no difference; NaN without an interval.

    It takes the spread of seeds in `difference` for the true one. With standard error e of the mean, known up to a
    factor f (whose square times the degrees of freedom follows a chi-square distribution), the mean must lie within
    margin - t f e. The result is the mean of that probability over quantiles of f.
    """
    degrees = difference.n - 1
    t, width = float(stdtrit(degrees, 1 - LEVEL)), margin / difference.error
    if math.isnan(width):
        return math.nan
    quantiles = [(number + 0.5) / _QUANTILES for number in range(_QUANTILES)]
    factors = (math.sqrt(float(chdtri(degrees, each)) / degrees) for each in quantiles)
    return math.fsum(max(0.0, 2 * float(ndtr(width - t * factor)) - 1) for factor in factors) / _QUANTILES


def seeds_for_power(difference: Difference, margin: float, power: float) -> int:
    """Return how many seeds find two groups without a difference equivalent with at least this probability.

    It takes the spread of seeds in `difference`, which must have an interval, for the true one; `MOST_SEEDS` at most.
    """
    spread = difference.error * math.sqrt(difference.n)

    def power_of(n: int) -> float:
        return power_without_difference(replace(difference, n=n, error=spread / math.sqrt(n)), margin)

    return 2 + bisect_left(range(2, MOST_SEEDS), power, key=power_of)


_QUANTILES = 1000
MOST_SEEDS = 10_000


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, so that all that stay below a level hold together at it.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian J. of Statistics 6 (1979).
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def _p_value(difference: Difference, margin: float) -> float:
    """Return the larger p of the tests that the mean is at most -margin, and at least +margin."""
    inside = margin - abs(difference.mean)
    return float(stdtr(difference.n - 1, -inside / difference.error))


def _verdict(difference: Difference, p_value: float, more_is_better: bool) -> str:
    if p_value < LEVEL:
        return EQUIVALENT
    if difference.low > 0:
        return BETTER if more_is_better else WORSE
    if difference.high < 0:
        return WORSE if more_is_better else BETTER
    return NOT_SETTLED
