"""Runs that are averaged differ in the seed only; means, intervals and tests are those of the textbook."""

from __future__ import annotations

import math

import pytest
from report_rows import row_of
from scipy import stats

from cdp_repro.report.accuracy import _p_text, accuracy_table, chosen_rate, comparisons
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
    infinite = Difference.paired({0: 3.0, 1: math.inf}, {0: 1.0, 1: 5.0})
    assert infinite.text() == "+inf (2)" and math.isnan(infinite.p_value)


def test_groups_that_differ_in_more_than_mode_and_rate_are_not_compared():
    other = Cell((*V1.overrides, "batch_size=128"))
    (dp,), (v1,) = grouped([row_of(DP)]), grouped([row_of(other)])
    with pytest.raises(RowError, match="would be compared, but differ in batch_size"):
        compared(v1, dp, "eval/top1_percent")


def test_groups_on_other_data_are_not_compared_and_of_other_code_not_silently():
    (dp,) = grouped([row_of(DP), row_of(DP, 1)])
    (other_data,) = grouped([row_of(V1, **{"dataset/fingerprint": "g", "dataset/description": "drawn anew"})])
    with pytest.raises(
        RowError, match=r"their data \(drawn anew, fingerprint g; made up, fingerprint f\): keep them in"
    ):
        compared(other_data, dp, "eval/top1_percent")
    one, two = (grouped([row_of(V1, seed, **code) for seed in (0, 1)])[0] for code in ({}, {"version/code": "d"}))
    said = [compared(each, dp, "eval/top1_percent").text() for each in (one, two)]
    assert said == ["+0.00 (2)", "+0.00 (2, of two versions)"]


def test_numbers_of_two_devices_are_not_averaged_and_not_compared_silently():
    """They differ by rounding; the number of threads does too, but may change when a run goes on."""
    gpu, cpu, threads = ({"hardware": f"{name} CPU threads"} for name in ("H200, 8", "x86_64 CPU, 1", "x86_64 CPU, 2"))
    with pytest.raises(RowError, match=r"digits-0 \(on x86_64 CPU\) and digits-1 \(on H200\) would be averaged"):
        grouped([row_of(V1, 0, **cpu), row_of(V1, 1, **gpu)])
    (dp,) = grouped([row_of(DP, 0, **cpu), row_of(DP, 1, **threads)])
    for hardware, said in ((gpu, "+0.00 (2, of two devices)"), (cpu, "+0.00 (2)")):
        (group,) = grouped([row_of(V1, seed, **hardware) for seed in (0, 1)])
        assert compared(group, dp, "eval/top1_percent").text() == said
    went_on = row_of(V1, hardware="x86_64 CPU, 1 CPU threads and x86_64 CPU, 2 CPU threads")
    assert went_on.device == "x86_64 CPU"


def test_text_is_compared_by_its_loss_and_only_one_learning_rate_is_untuned():
    text = [Cell(("dataset=text", "model=gpt", f"mode={mode}", f"optim.lr={rate}"))
            for mode, rate in (("dp", 0.001), ("cdp_v1", 0.001), ("cdp_v2", 0.002))]  # fmt: skip
    rows = [row_of(cell, study="mine", **{"eval/nats_per_token": 1.5 + number}) for number, cell in enumerate(text)]
    found = comparisons({"mine": grouped(rows)})
    assert [(each.group.mode, each.is_at_rate_of_dp) for each in found] == [
        ("dp", True), ("cdp_v1", True), ("cdp_v2", False)
    ]  # fmt: skip
    table = accuracy_table([*found, *comparisons({"digits": grouped([row_of(DP)])})], {})
    assert table.columns[5:7] == (
        "validation loss [nats a token] or test top-1 [%]", "minus dp [nats or points], 95 % interval"
    )  # fmt: skip
    assert [row[5:7] for row in table.rows[:3]] == [
        ["1.5000 (1)", ""], ["2.5000 (1)", "+1.0000 (1)"], ["3.5000 (1)", "+2.0000 (1)"]
    ]  # fmt: skip


def test_a_difference_that_rounds_to_zero_has_no_minus_and_a_small_p_is_not_rounded_to_less_than_it_is():
    assert Difference(-0.001, -0.004, 0.2, 0.005, 3).text(2) == "+0.00 [+0.00, +0.20] (3)"
    assert [_p_text(Difference(0, -1, 1, p, 3)) for p in (0.0009, 0.001, 0.005)] == ["< 0.001", "0.001", "0.005"]
