"""The looks that the figures of the report share."""

from __future__ import annotations

from itertools import combinations

from cdp_repro.report.charts import not_of_the_paper, style

MODES = ["dp", "cdp_v1", "cdp_v2", *(f"other {number}" for number in range(12))]


def test_no_two_modes_look_alike():
    others = not_of_the_paper(MODES)
    assert others == MODES[3:]
    looks = [style(mode, others) for mode in MODES]
    assert all(
        (one["color"], one["linestyle"]) != (two["color"], two["linestyle"]) for one, two in combinations(looks, 2)
    )


def test_a_broken_line_is_seen_on_an_unbroken_one():
    looks = [style(mode, not_of_the_paper(MODES)) for mode in MODES]
    unbroken = [look["zorder"] for look in looks if look["linestyle"] == "-"]
    broken = [look["zorder"] for look in looks if look["linestyle"] != "-"]
    assert max(unbroken) < min(broken)
