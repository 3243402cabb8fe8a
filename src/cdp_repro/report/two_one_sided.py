"""Whether two groups of runs are equivalent: two one-sided tests with a margin that was stated before the runs.

Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability", J. Pharmacokinetics and Biopharmaceutics 15 (1987).
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy.special import stdtr

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
