"""Runs that are averaged differ in the seed only; means, intervals and tests are those of the textbook."""

from __future__ import annotations

import math

import pytest
from report_rows import row_of
from scipy import stats

from cdp_repro.report.accuracy import chosen_rate, comparisons
from cdp_repro.report.groups import Difference, Sample, compared, grouped
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.rows import RowError
from cdp_repro.studies.study import Cell

DP, V1, V2 = STUDIES["digits"].cells


def test_a_group_holds_the_seeds_of_one_cell_in_order():
    rows = [row_of(V2, 1), row_of(DP, 3), row_of(V2, 0), row_of(DP, 2)]
    found = grouped(rows)
    assert [(group.mode, group.seeds) for group in found] == [("dp", [2, 3]), ("cdp_v2", [0, 1])]


def test_each_size_is_compared_with_data_parallelism_of_its_size():
    sizes = [Cell((*cell.overrides, f"epochs={epochs}")) for epochs in (2, 3) for cell in (DP, V2)]
    rows = [row_of(cell, study="mine", top1=90 + number) for number, cell in enumerate(sizes)]
    found = comparisons({"mine": grouped(rows, varied=("epochs",))})
    assert [(each.group.mode, each.difference and each.difference.mean) for each in found] == [
        ("dp", None), ("dp", None), ("cdp_v2", 1.0), ("cdp_v2", 1.0)
    ]  # fmt: skip


def test_no_rate_is_chosen_where_no_loss_is_finite():
    assert chosen_rate(grouped([row_of(DP, **{"train/loss": math.nan})])) is None


def test_runs_of_other_settings_are_never_averaged():
    other = Cell((*DP.overrides, "optim.lr=0.3", "epochs=2"))
    with pytest.raises(RowError, match=r"digits-0 and digits-1 would be averaged, but differ in epochs, optim\.lr"):
        grouped([row_of(DP), row_of(other, 1)])
    assert len(grouped([row_of(DP), row_of(other, 1)], varied=("optim.lr",))) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"version/code": "d", "version/git_commit": "fedcba"}, "commit fedcba"), ({"dataset/fingerprint": "g"}, "data")],
)
def test_runs_of_other_code_or_data_are_never_averaged(changed, message):
    with pytest.raises(RowError, match=message):
        grouped([row_of(DP, 0), row_of(DP, 1, **changed)])


def test_the_difference_is_the_paired_test_over_common_seeds():
    ours, theirs = [90.0, 91.5, 89.0, 92.0], [91.0, 91.0, 90.5, 93.5]
    a, b = grouped(
        [*(row_of(V1, seed, top1=x) for seed, x in enumerate(ours)), row_of(V1, 9, top1=0.0)]
        + [row_of(DP, seed, top1=x) for seed, x in enumerate(theirs)]
    )[::-1]
    found = compared(a, b, "eval/top1_percent")
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert found.n == 4
    assert (found.mean, found.p_value) == pytest.approx((-0.875, test.pvalue))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_one_seed_has_no_spread_and_no_common_seed_no_difference():
    assert math.isnan(Sample.from_values([3.0]).deviation) and Sample.from_values([3.0]).text() == "3.00 (1)"
    assert Sample.from_values([1.0, 3.0]).text() == "2.00 ± 1.41 (2)"
    one = Difference.paired({0: 3.0}, {0: 1.0, 1: 5.0})
    assert one.mean == 2 and math.isnan(one.low) and math.isnan(one.p_value)
    assert Difference.paired({0: 1.0}, {1: 1.0}) is None
    assert Difference.paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).p_value == 1


def test_groups_that_differ_in_more_than_mode_and_rate_are_not_compared():
    other = Cell((*V1.overrides, "batch_size=128"))
    (dp,), (v1,) = grouped([row_of(DP)]), grouped([row_of(other)])
    with pytest.raises(RowError, match="would be compared, but differ in batch_size"):
        compared(v1, dp, "eval/top1_percent")
