"""Verdicts on the claims follow from the numbers, whatever they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from report_rows import row_of

from cdp_repro.config.task import task_of
from cdp_repro.report.claims import FAILS, HOLDS, PARTLY, UNKNOWN, claims, memory_verdict
from cdp_repro.report.cost_table import Line
from cdp_repro.report.groups import Difference, Sample
from cdp_repro.report.two_one_sided import NOT_SETTLED
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.cost_settings import SETTINGS


@pytest.mark.parametrize(
    ("flops", "activations", "unevenness", "verdict"),
    [
        ({"a": 0.56, "b": 0.59}, {}, 1.0, HOLDS),
        ({"a": 0.56, "b": 0.59}, {}, 1.2, PARTLY),  # low, but not constant
        ({"a": 0.56, "b": 0.85}, {}, 1.0, PARTLY),
        ({"a": 0.56, "b": 0.85}, {}, 1.2, FAILS),  # neither
        ({"a": 0.56, "b": 0.85}, {"a": 0.57, "b": 0.58}, 1.2, PARTLY),
        ({"a": 0.56, "b": 1.05}, {"a": 0.57, "b": 0.7}, 1.0, PARTLY),
        ({"a": 0.56, "b": 1.05}, {}, 1.0, FAILS),
        ({"a": 1.0}, {"a": 1.2}, 1.0, FAILS),
    ],
)
def test_memory_is_about_half_and_flat_or_lower_or_not(flops, activations, unevenness, verdict):
    assert memory_verdict({"flops": flops, "activations": activations}, 0.5625, unevenness) == verdict


@pytest.mark.parametrize(("high", "said"), [(1.0064986, "0.7"), (1.0061, "0.7"), (1.006, "0.6"), (1.0, "0.0")])
def test_how_far_memory_is_above_its_mean_is_rounded_up(high, said, monkeypatch):
    case = SimpleNamespace(workers=8, partition="flops", model="mlp", ratios={"paper": 0.6, "backward_first": 0.6})
    monkeypatch.setattr("cdp_repro.report.claims._unevenness", lambda case: high)
    assert f"at most {said} % above the mean." in claims([case], (), (), ())[0].because


SENT = {"sent_bytes_per_device": 2048.0, "most_sent_bytes": 3072.0}


def _lines(placement, **of_mode):
    """Return lines of a placement with N = 4; `of_mode`: what each mode was executed, simulated and derived to give."""
    return [
        Line(each, 4, numbers, SENT | numbers, numbers)
        for each in SETTINGS
        if each.placement == placement and each.baseline is None and not each.collectives
        and (numbers := of_mode.get(each.mode))
    ]  # fmt: skip


def test_the_chain_must_be_1_with_every_number_of_workers():
    lines = _lines("replicated", dp={"chain": 6}, cdp_v1={"chain": 1}, cdp_v2={"chain": 1})
    claim = claims((), lines, (), ())[1]
    assert claim.verdict == HOLDS and "1 for cdp_v2 (1 with every N that ran), against 6" in claim.because
    assert (
        "in a training step: 2 KiB against 2 KiB on average, 3 KiB against 3 KiB where they are most" in claim.because
    )
    longer = replace(lines[1], workers=8, executed={"chain": 2})
    claim = claims((), [*lines, longer], (), ())[1]
    assert claim.verdict == FAILS and "(not 1 with every N that ran)" in claim.because
    derived = replace(lines[1], workers=8, closed={"chain": 2})
    assert claims((), [*lines, derived], (), ())[1].verdict == FAILS


@pytest.mark.parametrize(("ours", "more", "verdict"), [(10, 4096, HOLDS), (16, 3072, FAILS), (17, 1024, FAILS)])
def test_fewer_devices_are_counted(ours, more, verdict):
    dp = {"devices": 16, "idle_share": 0.75}
    lines = _lines("model_parallel", dp=dp, cdp_v2={"devices": ours, "idle_share": 0.6, "most_sent_bytes": more})
    claim = claims((), lines, (), ())[3]
    assert claim.verdict == verdict and claim.brief == f"{ours} processes against 16 with N = 4"
    assert ("sends more" in claim.because) == (more == 4096)


@pytest.mark.parametrize(("most", "verdict"), [(1, HOLDS), (2, FAILS)])
def test_an_owner_sends_to_one_worker_at_once(most, verdict, monkeypatch):
    lines = _lines("zero", dp={"chain": 2}, cdp_v2={"chain": 2})
    if most == 1:
        assert claims((), lines, (), ())[4].brief == "an owner sends to 1 worker at once, against 3", "by simulation"
    monkeypatch.setattr("cdp_repro.report.claims._most_lent_at_once", lambda mode, n: 3 if mode == "dp" else most)
    assert claims((), lines, (), ())[4].verdict == verdict


def test_a_read_of_two_steps_ago_breaks_the_bound():
    row = row_of(STUDIES["cifar10"].cells[1], 0, "cifar10", staleness=[[1, 2]])
    assert claims((), (), (), [row])[5].verdict == FAILS


def test_cdp_is_compared_with_data_parallelism_by_ordered_messages():
    lines = [
        Line(each, 2, {"chain": 1}, SENT, {"chain": 9 if each.collectives else 1})
        for each in SETTINGS
        if each.placement == "replicated" and each.baseline is None
    ]
    assert any(line.setting.collectives for line in lines)
    claim = claims((), lines, (), ())[1]
    assert "against 1 for our data parallelism" in claim.because and claim.verdict == HOLDS


def _untuned(dataset, *intervals, study="cifar10", model="resnet8", epochs=15):
    """Return comparisons of both modes with data parallelism by their intervals, (low, high) or None if not run."""
    config = {"dataset.name": dataset, "model.name": model, "epochs": epochs}
    return [
        SimpleNamespace(
            study=study,
            group=SimpleNamespace(mode=mode, config=config),
            task=task_of(dataset),
            is_at_rate_of_dp=True,
            difference=Difference(sum(interval) / 2, *interval, 0.5, 5),
        )
        for mode, interval in zip(("cdp_v1", "cdp_v2"), intervals, strict=True)
        if interval
    ]


@pytest.mark.parametrize(
    ("dataset", "intervals", "verdict"),
    [
        ("cifar10", [(0.1, 0.3), (0.2, 0.4)], HOLDS),
        ("cifar10", [(-0.1, 0.3), (0.2, 0.4)], PARTLY),
        ("cifar10", [(-0.1, 0.3), (-0.2, 0.4)], NOT_SETTLED),
        ("cifar10", [(-0.3, -0.1), (-0.2, 0.4)], NOT_SETTLED),  # neither mode keeps the accuracy for sure
        ("cifar10", [None, (0.2, 0.4)], PARTLY),  # only one mode has run
        ("cifar10", [(-0.3, -0.1), None], NOT_SETTLED),
        ("cifar10", [(-0.3, -0.1), (0.2, 0.4)], PARTLY),
        ("cifar10", [(-0.3, -0.1), (-0.4, -0.2)], FAILS),
        ("digits", [(0.1, 0.3), (0.2, 0.4)], UNKNOWN),  # the claim names other data
    ],
)
def test_without_tuning_the_claim_of_accuracy_follows_the_intervals(dataset, intervals, verdict):
    claim = claims((), (), _untuned(dataset, *intervals), ())[2]
    assert claim.verdict == verdict and f"cifar10 resnet8 cdp_v{2 if intervals[1] else 1}" in claim.because


def test_a_single_seed_decides_nothing():
    found = _untuned("cifar10", (0.1, 0.3), (0.2, 0.4))
    for each in found:
        each.difference = replace(each.difference, n=1)
    assert claims((), (), found, ())[2].verdict == UNKNOWN


def test_the_claim_names_each_network_and_what_was_run_of_it():
    small = _untuned("cifar10", (-0.3, -0.1), (-0.3, -0.1))
    claim = claims((), (), small, ())[2]
    run = "cifar10 with resnet8 for 15 epochs; not run: imagenet"
    assert claim.brief == f"cdp_v1 -0.20, cdp_v2 -0.20 points of top-1 on cifar10 ({run})"
    assert f"It is judged on: {run}." in claim.because
    large = _untuned("imagenet", (1.0, 3.0), (2.0, 4.0), study="paper-cifar10-resnet18", model="resnet50", epochs=90)
    claim = claims((), (), [*small, *large], ())[2]
    assert "cifar10 with resnet8; cdp_v1 +2.00, cdp_v2 +3.00 points of top-1 on imagenet with resnet50" in claim.brief
    assert "cifar10 with resnet8 for 15 epochs, imagenet with resnet50 for 90 epochs." in claim.because


def test_studies_of_a_users_own_decide_nothing():
    ours = _untuned("cifar10", (-0.3, -0.1), (-0.3, -0.1))
    assert (
        claims((), (), [*ours, *_untuned("cifar10", (0.1, 0.3), (0.1, 0.3), study="mine")], ())[2]
        == claims((), (), ours, ())[2]
    )


def test_a_mode_that_is_better_in_one_study_and_not_in_another_keeps_nothing():
    better, mixed = _untuned("cifar10", (0.1, 0.3), (0.2, 0.4)), _untuned("cifar10", (0.1, 0.3), (-0.3, -0.1))
    assert claims((), (), [*better, *better], ())[2].verdict == HOLDS
    assert claims((), (), [*better, *mixed], ())[2].verdict == PARTLY


def test_a_pair_with_two_learning_rates_decides_nothing_about_untuned_runs():
    untuned, other = _untuned("cifar10", (0.1, 0.3), (0.2, 0.4)), _untuned("cifar10", (-0.3, -0.1), (-0.3, -0.1))
    for each in other:
        each.is_at_rate_of_dp = False
    assert claims((), (), [*untuned, *other], ())[2] == claims((), (), untuned, ())[2]
    assert claims((), (), other, ())[2].verdict == UNKNOWN


def test_a_run_that_two_studies_have_counts_once():
    cell = STUDIES["cifar10"].cells[1]
    first, second = (
        row_of(cell, seed, study, staleness=[[1, 0]], **{"ledger/reads": 10})
        for seed, study in ((0, "cifar10"), (1, "cifar10"))
    )
    taken_over = replace(first, study="cifar10-delay")
    claim = claims((), (), (), [first, second, taken_over])[5]
    assert claim.brief == "20 reads checked, none more than 1 step old" and "in 2 runs all 20" in claim.because


def test_a_number_that_is_not_finite_has_no_spread():
    assert Sample.from_values([float("inf"), 1.0]).text() == "inf ± nan (2)"
