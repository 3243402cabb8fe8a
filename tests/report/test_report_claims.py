"""Verdicts on the claims follow from the numbers, whatever they are."""

from __future__ import annotations

import pytest

from cdp_repro.report.claims import FAILS, HOLDS, PARTLY, memory_verdict


@pytest.mark.parametrize(
    ("flops", "activations", "unevenness", "verdict"),
    [
        ({"a": 0.56, "b": 0.59}, {}, 1.0, HOLDS),
        ({"a": 0.56, "b": 0.59}, {}, 1.2, PARTLY),  # low, but not constant
        ({"a": 0.56, "b": 0.85}, {}, 1.0, PARTLY),
        ({"a": 0.56, "b": 1.05}, {"a": 0.57, "b": 0.7}, 1.0, PARTLY),
        ({"a": 0.56, "b": 1.05}, {}, 1.0, FAILS),
        ({"a": 1.0}, {"a": 1.2}, 1.0, FAILS),
    ],
)
def test_memory_is_about_half_and_flat_or_lower_or_not(flops, activations, unevenness, verdict):
    assert memory_verdict({"flops": flops, "activations": activations}, 0.5625, unevenness) == verdict
