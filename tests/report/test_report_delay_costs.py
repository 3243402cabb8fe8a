"""What delay costs: how rates are tuned, when a difference is a verdict, and the claim that rests on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from delay_world import BEST_AT_02, OTHERS, SETTINGS, SMALL, STATE, World, compared, studies_of, tried
from report_rows import row_of

from cdp_repro.config.task import task_of
from cdp_repro.report import tuning
from cdp_repro.report.claims import FAILS, HOLDS, PARTLY, UNKNOWN, claims, tuned_verdict
from cdp_repro.report.delay_advice import advice
from cdp_repro.report.delay_costs import _notes, _simulated, read_times
from cdp_repro.report.groups import Difference, grouped
from cdp_repro.report.standing import best_of_each_mode, standings
from cdp_repro.report.tuning import method_of, passed_on, rate_table, setting_of, tuned_rates
from cdp_repro.report.two_one_sided import NOT_SETTLED
from cdp_repro.studies.delay_studies import CIFAR10, FRESH_SEEDS, TEXT, TUNING_SEED
from cdp_repro.studies.rows import RowError, read_rows

ROWS = Path(__file__).resolve().parents[2] / "results" / "rows"


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr("cdp_repro.report.claims._CLAIMED_DATA", ("digits",))
    return World(monkeypatch)


def test_every_setting_has_the_same_grid_once_on_a_seed_of_its_own():
    for benchmark in (CIFAR10, TEXT, SMALL):
        study, *others = benchmark.studies()
        rates = {}
        for cell in study.cells:
            assert cell.seeds == (TUNING_SEED,)
            rates.setdefault(setting_of(cell.settings), []).append(cell.settings["optim.lr"])
        assert {tuple(each) for each in rates.values()} == {benchmark.grid} and len(rates) == len(benchmark.settings)
        for finals in (other for other in others if other.kind == "delay-finals"):
            assert {cell.seeds for cell in finals.cells} == {(TUNING_SEED,)}
        used = {seed for other in others if other.kind == "delay" for cell in other.cells for seed in cell.seeds}
        assert TUNING_SEED not in used and not {*FRESH_SEEDS} & {*benchmark.seeds}


def test_the_settings_are_those_that_the_literature_names():
    def methods(study):
        return {(cell.settings["mode.name"], method_of(cell.settings)) for cell in study.cells}

    cifar10, text = (methods(next(benchmark.studies())) for benchmark in (CIFAR10, TEXT))
    for mode in ("dp", "cdp_v1", "cdp_v2"):
        assert {(mode, "sgd"), (mode, "sgd nesterov")} <= cifar10 and {(mode, "adamw"), (mode, "nadamw")} <= text
    for mode in ("cdp_v1", "cdp_v2"):
        assert {(mode, f"sgd{each}") for each in (" + error_feedback", " + prediction")} <= cifar10
        assert {(mode, f"adamw{each}") for each in (" + error_feedback", " + prediction")} <= text
    assert {
        ("cdp_v2", "sgd, accumulate 2"),
        ("cdp_v2", "sgd, accumulate 4"),
        ("cdp_v1", "sgd + compensation"),
    } <= cifar10
    assert ("dp", "muon") in text
    for mode in ("cdp_v1", "cdp_v2"):
        assert {(mode, "muon"), (mode, "muon + error_feedback")} <= text, "each mode has each optimizer's chance"


@pytest.mark.parametrize("benchmark", [CIFAR10, TEXT], ids=lambda benchmark: benchmark.name)
def test_what_goes_on_is_what_the_committed_rows_chose(benchmark):
    studies = studies_of(benchmark)
    groups = {each.name: grouped(read_rows(ROWS / each.name), each.varied) for each in studies.values()}
    keys = [setting_of(cell.settings) for cell in studies["delay-tuning"].cells[:: len(benchmark.grid)]]
    of_setting = dict(zip(benchmark.settings, keys, strict=True))
    for chosen, after in (
        (benchmark.finalists, "delay-finals"),
        (benchmark.rates, "delay"),
        (benchmark.best, "verdict"),
    ):
        assert bool(chosen) == (after in studies), "none runs before the study that chooses for it"
        assert chosen or not (ROWS / f"{benchmark.name}-{after}").exists()
    if benchmark.finalists:
        found = passed_on(groups[studies["delay-tuning"].name], studies["delay-tuning"])
        for setting, rates in benchmark.finalists.items():
            assert {*rates[:2]} == {*found[of_setting[setting]]}, setting
    if benchmark.rates:
        tuned = tuned_rates(studies["delay-finals"], groups)
        assert {setting: tuned[of_setting[setting]].rate for setting in benchmark.rates} == benchmark.rates
    if benchmark.best:
        best = best_of_each_mode(standings(studies["delay"], groups))
        assert [of_setting[each] for each in benchmark.best] == [
            setting_of(each.group.config) for each in best.values()
        ]


def test_the_best_of_short_runs_go_on_and_none_from_the_edge_or_before_all_have_run(world):
    short = world.studies["delay-tuning"]
    losses = (2.0, 1.0, 0.9, 1.1), (0.9, 0.8, 1.0, 1.1), (2.0, 1.0, 0.9, None), (2, 0.95, 0.95, 1), BEST_AT_02
    groups = tried(short, losses)
    first, second, _, fourth, fifth = (setting_of(cell.settings) for cell in short.cells[::4])
    assert passed_on(groups, short) == {first: (0.2, 0.1), second: (), fourth: (0.1, 0.2), fifth: (0.2, 0.1)}
    world.have("delay-tuning", groups)
    table = rate_table(short, world.groups)
    assert table.columns == ("mode", "method", "lr 0.05", "lr 0.1", "lr 0.2", "lr 0.4", "chosen")
    assert [row[-1] for row in table.rows] == ["0.1, 0.2", "at the edge: extend the grid", "", "0.1, 0.2", "0.1, 0.2"]
    assert table.rows[2][2:6] == ["2.0000", "1.0000", "0.9000", "not run"]
    assert f"accuracy.py {short.name}`" in table.notes[0]


@pytest.mark.parametrize(
    ("full", "rate", "missing"),
    [
        ((None, 1.0, 0.9, 1.1), 0.2, ""),
        ((0.8, 1.0, 0.9, 1.1), None, "0.05 is at the edge of the grid: extend it"),
        ((None, 0.8, 0.9, 1.1), None, "0.1 is lowest so far; not run at full length: 0.05"),
        ((None, 1.0, None, None), None, "not run at full length: 0.2"),
        ((None, inf, inf, None), None, "all rates diverge at full length"),
        ((None, 1.0, 0.9, inf), 0.2, ""),
    ],
)
def test_a_rate_is_chosen_when_it_lies_between_two_that_lose_at_full_length(world, full, rate, missing):
    finals = world.studies["delay-finals"]
    world.have("delay-finals", tried(finals, [full, *OTHERS]))
    found = tuned_rates(finals, world.groups)
    dp = setting_of(finals.cells[0].settings)
    assert (found.pop(dp), {each.rate for each in found.values()}) == (tuning.TunedRate(rate, missing), {0.2})
    table = rate_table(finals, world.groups)
    assert [row[-1] for row in table.rows] == [missing or "0.2"] + ["0.2"] * len(OTHERS)


@pytest.mark.parametrize(
    ("full", "between", "best"),
    [
        (BEST_AT_02, ((0.15, 0.7), (0.3, 0.8)), 0.15),
        ((None, 1.0, 0.9, None), ((0.3, 1.1),), 0.2),  # 0.3 stands nearer than 0.4, which need not run
    ],
)
def test_a_rate_between_two_of_the_grid_may_win_or_lose(world, full, between, best):
    finals = world.studies["delay-finals"]
    own = tried(finals, [full, *OTHERS])
    for rate, loss in between:
        cell = replace(finals.cells[0], overrides=(*finals.cells[0].overrides, f"optim.lr={rate}"))
        own += grouped([row_of(cell, TUNING_SEED, finals.name, **{"train/loss": loss})], finals.varied)
    world.have("delay-finals", own)
    assert tuned_rates(finals, world.groups)[setting_of(finals.cells[0].settings)].rate == best


def test_no_rate_is_chosen_that_the_short_runs_did_not_pass_on(world):
    short, finals = world.studies["delay-tuning"], world.studies["delay-finals"]
    world.have("delay-tuning", tried(short, [(0.1, 1.0, 0.9, 1.1), (1, 2, 3, None), *OTHERS[1:]]))
    world.judge(0, 0)
    missing = [each.missing for each in tuned_rates(finals, world.groups).values()]
    assert missing == ["at the edge of the grid: extend it", "the short runs are not complete", "", "", ""]
    assert [each.verdict for each in world.standings("verdict")] == ["", ""], "that of dp is not tuned"


def test_a_rate_that_diverges_is_told_and_never_wins(world):
    short = world.studies["delay-tuning"]
    world.have("delay-tuning", tried(short, [(1.5, 1.0, 0.5, inf)] * len(SETTINGS)))
    assert set(passed_on(world.groups[short.name], short).values()) == {(0.2, 0.1)}, "not the largest, which diverges"
    table = rate_table(short, world.groups)
    assert [row[5] for row in table.rows] == ["diverged"] * len(SETTINGS)


@pytest.mark.parametrize(("nbytes", "shown"), [(2**19, " + 2.00 + 0.50"), (0, " + 2.00")])
def test_copies_that_stale_reads_see_are_shown_where_there_are_any(world, nbytes, shown):
    verdict = world.studies["verdict"]
    changed = {"memory/predicted_parameter_bytes_per_device": nbytes}
    world.have("verdict", compared(verdict, lambda number, seed: 90 + 0.1 * seed, **changed))
    assert world.table("verdict").rows[1][9] == f"not measured + 1.00{shown}"


def test_simulated_state_is_that_of_runs_that_measured_it():
    rows = [row for row in read_rows(ROWS) if row.study == "cifar10-larger"]
    for row in rows:
        found = _simulated(row.config, row.costs.parameter_bytes)
        assert {f"{key}_per_device" for key in found} <= row.summary.keys()
        assert found == {key: row.summary[f"{key}_per_device"] for key in found}
    assert any(row.summary["memory/predicted_parameter_bytes_per_device"] for row in rows)


def test_what_a_device_keeps_between_two_runs_counts(world):
    verdict, peak = world.studies["verdict"], {"memory/parameter_peak_bytes_per_device": 2**20}
    for drained, shown in ((2**21, "2.00 + "), (2**19, "1.00 + ")):
        changed = {**peak, "memory/parameter_bytes_per_device": drained}
        world.have("verdict", compared(verdict, lambda number, seed: 90 + 0.1 * seed, **changed))
        assert world.table("verdict").rows[1][9].startswith(shown)


def test_what_a_device_keeps_is_told_by_a_run_that_has_finished(world):
    verdict, peak = world.studies["verdict"], {"memory/parameter_peak_bytes_per_device": 2**20}
    first = verdict.cells[0].seeds[0]
    groups = compared(
        verdict, lambda number, seed: None if seed == first else 90 + 0.1 * seed,
        **peak, **{"memory/parameter_bytes_per_device": 2**20},
    )  # fmt: skip
    for group in groups:
        assert group.rows[0].has_diverged
        del group.rows[0].summary["memory/parameter_peak_bytes_per_device"]
    world.have("verdict", groups)
    told = {row[9].removesuffix(" + 0.00*") for row in world.table("verdict").rows}
    assert told == {"1.00 + 1.00 + 2.00"}


def test_verdicts_come_from_fresh_seeds_alone_and_the_other_table_chooses(world):
    world.judge(0.05, 1.0)
    table = world.table("verdict", {("digits", setting_of(world.studies["verdict"].cells[1].settings)): "1.02"})
    assert table.columns[5] == "verdict" and [row[5] for row in table.rows] == ["", "equivalent", "worse"]
    assert [row[1] for row in table.rows] == ["sgd", "sgd + prediction", "sgd + compensation"]
    assert [row[8] for row in table.rows] == ["", "1.02", ""]
    assert table.rows[1][9] == "not measured + 1.00 + 2.00 + 0.00*", "by rows of before they were"
    assert "* simulated, as rows of older versions lack it" in table.notes[0]
    assert table.columns[6:8] == ("p (corrected)", "power") and [row[7] for row in table.rows] == ["", "1.00", "1.00"]
    assert table.rows[2][6] == "1 (1)" and "less than 0.3 points" in " ".join(table.notes)
    delay = world.studies["delay"]
    world.have("delay", compared(delay, lambda number, seed: 90 + 0.1 * seed + (0, -0.2, -0.4, -0.1, 0.1)[number]))
    table = world.table("delay")
    assert table.columns[5] == "goes on to fresh seeds" and "only chooses" in " ".join(table.notes)
    assert {(row[0], row[1]): row[5] for row in table.rows} == {
        ("dp", "sgd"): "", ("dp", "sgd nesterov"): "", ("cdp_v1", "sgd + prediction"): "",
        ("cdp_v1", "sgd nesterov"): "yes", ("cdp_v2", "sgd + compensation"): "yes",
    }  # fmt: skip
    assert [row[4][:5] for row in table.rows] == ["", "", "-0.20", "-0.20", "-0.40"], "dp nesterov has 0.1 more"
    assert table.columns[-1] == "minus dp with sgd [points]"
    assert {(row[0], row[1]): row[-1][:5] for row in table.rows if row[-1]} == {
        ("dp", "sgd nesterov"): "+0.10", ("cdp_v1", "sgd nesterov"): "-0.10"
    }, "with an optimizer of their own"  # fmt: skip
    assert [each.verdict for each in world.standings("delay")] == [""] * 3


def test_a_setting_that_was_judged_before_stays_beside_the_one_that_is_better_now(monkeypatch):
    world = World(monkeypatch, replace(SMALL, judged_before=SETTINGS[3:4]))
    judged = {(each.group.mode, each.optimizer): each.verdict for each in world.judge(0, 1.0, 0, 0)}
    assert judged == {
        ("cdp_v1", "sgd nesterov"): "worse", ("cdp_v1", "sgd"): "equivalent", ("cdp_v2", "sgd"): "equivalent"
    }  # fmt: skip
    advised = advice(world.standings("verdict"), [], {}, {})
    assert "nesterov=true" not in advised and advised.count("is within 0.3 points of") == 2, "the best of each mode"
    said = "one more chance to seem equivalent"
    assert said in " ".join(world.table("verdict").notes)
    once = World(monkeypatch)
    once.judge(0, 0)
    assert said not in " ".join(once.table("verdict").notes)


def test_a_larger_network_runs_the_best_at_the_same_rates_and_gives_no_verdict(world):
    study = world.studies["larger"]
    assert [(cell.settings["model.name"], cell.settings["optim.lr"], cell.seeds) for cell in study.cells] == [
        ("resnet20", 0.2, (0, 1, 2))
    ] * 5
    assert [cell.overrides[2:-4] for cell in study.cells] == [
        tuple(SETTINGS[number].split()) for number in (0, 4, 3, 1, 2)
    ], "data parallelism with each optimizer first"
    world.have(
        "larger", compared(study, lambda number, seed: 90 + 0.1 * seed - number, lambda number, seed: number < 4)
    )
    table = world.table("larger", {("digits", setting_of(study.cells[1].settings)): "1.02"})
    assert [len(row) for row in table.rows] == [len(table.columns)] * 5 and table.rows[4][3].startswith("not run")
    assert not {"verdict", "goes on to fresh seeds", "step time over dp"} & {*table.columns}, "times are of the smaller"
    assert {row[1]: row[4][:5] for row in table.rows[:4] if row[0] != "dp"} == {
        "sgd nesterov": "-1.00", "sgd + prediction": "-3.00"
    }, "each against data parallelism with its optimizer"  # fmt: skip
    assert "No verdict" in " ".join(table.notes)
    assert [each.verdict for each in world.standings("larger")] == ["", ""]


def test_a_setting_is_chosen_when_all_runs_of_its_mode_have_ended(world):
    def said(keep):
        world.have("delay", compared(world.studies["delay"], lambda number, seed: 90 - number, keep))
        return {row[1]: row[5] for row in world.table("delay").rows if row[5]}

    assert said(lambda number, seed: True) == {"sgd + prediction": "yes", "sgd + compensation": "yes"}
    assert said(lambda number, seed: number != 3) == {"sgd + prediction": "best so far", "sgd + compensation": "yes"}
    assert said(lambda number, seed: number != 2 or seed == 0)["sgd + compensation"] == "best so far"
    assert said(lambda number, seed: number != 4) == {"sgd + prediction": "best so far", "sgd + compensation": "yes"}
    told = {row[1]: row[4] for row in world.table("delay").rows if row[0] == "cdp_v1"}
    assert told["sgd nesterov"] == "no run of dp with its optimizer"
    finals = world.studies["delay-finals"]
    world.have("delay-finals", tried(finals, [*[BEST_AT_02] * 2, (1.2, 0.9, 1.0, None), *OTHERS[2:]]))
    found = said(lambda number, seed: True)
    assert found == {"sgd + prediction": "yes", "sgd + compensation": "best so far"}, "its tuning chose another rate"


def test_settings_are_chosen_by_seeds_that_all_of_a_mode_have(world):
    """Seed 2 is easy: a setting that lacks it is not worse for that."""

    def top1(number, seed):
        return 90 + 3 * (seed == 2) - (number == 1)

    world.have("delay", compared(world.studies["delay"], top1, lambda number, seed: number != 3 or seed < 2))
    best = best_of_each_mode(world.standings("delay"))
    assert method_of(best["cdp_v1"].group.config) == "sgd nesterov", "1 better on the seeds 0 and 1"


def test_a_verdict_waits_for_all_runs_of_both_sides_and_says_for_which(world):
    (first, second) = world.judge(0, 0, keep=lambda number, seed: number != 1 or seed < 18)
    assert (first.verdict, first.missing, second.verdict) == ("", "8 of 10 runs", "equivalent")
    assert [row[5] for row in world.table("verdict").rows] == ["", "none yet: 8 of 10 runs", "equivalent"]
    found = world.judge(0, 0, keep=lambda number, seed: number or seed < 12)
    assert {(each.verdict, each.missing) for each in found} == {("", "dp: 2 of 10 runs")}
    assert world.claim().verdict == UNKNOWN


def test_runs_on_seeds_that_the_study_does_not_have_are_no_part_of_a_verdict(world):
    study = world.studies["verdict"]
    more = replace(study, cells=tuple(replace(cell, seeds=range(30)) for cell in study.cells))

    def score(number, seed):  # on the other seeds, data parallelism is far better
        return 90 + 0.1 * (seed % 3) - (number if seed not in FRESH_SEEDS else 0.01 * number * (seed % 2))

    world.have("verdict", compared(study, score))
    planned = [each.text for each in world.standings("verdict")]
    world.have("verdict", compared(more, score))
    assert [each.text for each in world.standings("verdict")] == planned
    assert {each.verdict for each in world.standings("verdict")} == {"equivalent"}


def test_a_verdict_needs_rates_that_the_tuning_chose_on_both_sides(world):
    finals = world.studies["delay-finals"]
    other = (1.2, 0.9, 1.0, None)
    world.have("delay-finals", tried(finals, [BEST_AT_02, other, *OTHERS[1:]]))
    first, second = world.judge(0, 0)
    assert (first.verdict, first.missing, second.verdict) == ("", "the tuning chose 0.1", "equivalent")
    assert world.table("verdict").rows[1][2] == "0.2 (the tuning chose 0.1)"
    world.have("delay-finals", tried(finals, [other, *OTHERS]))
    assert {each.missing for each in world.judge(0, 0)} == {"dp: the tuning chose 0.1"}
    del world.groups[finals.name]
    assert {each.missing for each in world.judge(0, 0)} == {"not run at full length: 0.1, 0.2"}
    assert {each.verdict for each in world.standings("verdict")} == {""} and world.claim().verdict == UNKNOWN


def test_a_verdict_needs_one_code_and_one_data_set(world):
    group = world.judge(0, 0)[0].group
    dp, _, other = world.groups[world.studies["verdict"].name]

    def with_other(name):
        rows = tuple(replace(row, summary={**row.summary, name: "other"}) for row in group.rows)
        world.have("verdict", [dp, replace(group, rows=rows), other])
        return world.standings("verdict")

    first, second = with_other("version/code")
    assert (first.missing, second.verdict) == ("its code is another than that of dp", "equivalent")
    with pytest.raises(RowError, match="would be compared, but differ in their data"):
        with_other("dataset/fingerprint")


def test_a_setting_that_diverges_on_a_seed_is_worse_and_one_of_dp_gives_no_verdict(world):
    first, second = world.judge(None, 0)
    assert (first.verdict, first.difference.split(", ")[-1], second.verdict) == ("worse", "3 diverged", "equivalent")
    assert "(7) points, 3 diverged, minus dp" in first.text
    assert world.table("verdict").rows[1][3].endswith("(7)")
    rows = [[row if row.seed % 4 else replace(row, summary={**row.summary, "diverged": True}) for row in group.rows]
            for group in world.groups[world.studies["verdict"].name][:1]]  # fmt: skip
    _, *others = world.groups[world.studies["verdict"].name]
    world.have("verdict", [replace(others[0], rows=tuple(rows[0])), *others])
    assert {each.missing for each in world.standings("verdict")} == {"dp diverged"}


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [
        ((0.0, 0.05), HOLDS),
        ((0.0, 1.0), PARTLY),
        ((1.0, 1.0), FAILS),
        ((None, 1.0), FAILS),
    ],
)
def test_the_claim_of_accuracy_rests_on_the_verdicts(world, lost, verdict):
    world.judge(*lost)
    claim = world.claim()
    assert claim.verdict == verdict and "on fresh seeds" in claim.because
    assert ("cdp_v1 with sgd + prediction equivalent" in claim.because) == (lost[0] == 0)


def _judged(mode, dataset, verdict):
    config = {"dataset.name": dataset, "model.name": "resnet8"}
    return SimpleNamespace(verdict=verdict, group=SimpleNamespace(mode=mode, config=config))


@pytest.mark.parametrize(
    ("of_networks", "verdict"),
    [
        ([("cifar10", "equivalent"), ("imagenet", "equivalent")], HOLDS),
        ([("cifar10", "equivalent"), ("imagenet", "worse")], NOT_SETTLED),
        ([("cifar10", "worse"), ("cifar10", "equivalent")], HOLDS),  # a mode counts by its best setting
        ([("cifar10", "worse"), ("imagenet", "worse")], FAILS),
        ([("digits", "equivalent")], NOT_SETTLED),
    ],
)
def test_a_mode_must_keep_the_accuracy_on_every_network(of_networks, verdict):
    judged = [_judged(mode, data, said) for data, said in of_networks for mode in ("cdp_v1", "cdp_v2")]
    assert tuned_verdict(judged) == verdict


@pytest.mark.parametrize(("other", "verdict"), [("worse", FAILS), ("not settled", NOT_SETTLED), ("better", PARTLY)])
def test_the_claim_fails_only_if_both_modes_are_worse(other, verdict):
    judged = [_judged("cdp_v1", "cifar10", "worse"), _judged("cdp_v2", "cifar10", other)]
    assert tuned_verdict(judged) == verdict


def test_a_verdict_needs_one_device(world):
    found = world.judge(0, 0)
    assert {each.verdict for each in found} == {"equivalent"}
    for group in world.groups[world.studies["verdict"].name]:
        if group.mode == "dp":
            for row in group.rows:
                row.summary["hardware"] = "another, 1 CPU threads"
    assert {each.missing for each in world.standings("verdict")} == {"it ran on another device than dp"}


def test_where_nothing_is_settled_the_claim_is_not(world):
    def top1(number, seed):
        return 90 + (number > 0) * (0.8 if seed % 2 else -0.9)

    world.have("verdict", compared(world.studies["verdict"], top1))
    assert {each.verdict for each in world.standings("verdict")} == {NOT_SETTLED} == {world.claim().verdict}


def test_the_claim_names_both_modes_and_its_data_sets_alone_decide(world, monkeypatch):
    first, second = world.judge(0, 1.0)
    assert claims((), (), (), (), [first])[2].verdict == PARTLY, "only one mode was judged"
    monkeypatch.setattr("cdp_repro.report.claims._CLAIMED_DATA", ("cifar10",))
    other = claims((), (), (), (), [first, second])[2]
    assert other.verdict == UNKNOWN and "equivalent" in other.because, "evidence that decides nothing"
    config = {"dataset.name": "cifar10", "model.name": "resnet8", "epochs": 15}
    untuned = [
        SimpleNamespace(
            study="cifar10",
            group=SimpleNamespace(mode=mode, config=config),
            difference=Difference(-1.0, -1.2, -0.8, 0.01, 5),
            task=task_of("cifar10"),
            is_at_rate_of_dp=True,
        )
        for mode in ("cdp_v1", "cdp_v2")
    ]
    assert claims((), (), untuned, (), [first, second])[2].verdict == FAILS, "no more do they hide an untuned verdict"


def test_a_text_study_is_judged_by_nats_of_which_fewer_are_better(monkeypatch):
    settings = (
        "optim=adamw mode=dp", "optim=nadamw mode=cdp_v1", "optim=muon mode=dp", "optim=muon mode=cdp_v1",
        "optim=nadamw mode=dp",
    )  # fmt: skip
    grid = (5e-4, 1e-3, 2e-3, 4e-3)
    benchmark = replace(
        TEXT, settings=settings, grid=grid, finalists=dict.fromkeys(settings, grid),
        rates=dict.fromkeys(settings, 2e-3), best=(settings[1], settings[3]),
        judged_before=(),
    )  # fmt: skip
    world = World(monkeypatch, benchmark)
    study = world.studies["verdict"]
    assert [cell.overrides[-4:-1] for cell in study.cells][:3] == [
        ("epochs=2", f"optim={name}", "mode=dp") for name in ("adamw", "muon", "nadamw")
    ], "each optimizer of the best has its data parallelism"  # fmt: skip
    nats, change = {"nadamw": 1.5, "adamw": 1.4, "muon": 1.3}, {"nadamw": 0.2, "muon": -0.1}
    rows = [
        row_of(cell, seed, study.name, **STATE, **{
            "eval/nats_per_token": nats[cell.settings["optim.name"]] + 0.001 * (seed % 2)
            + (change[cell.settings["optim.name"]] + 1e-4 * seed if cell.settings["mode.name"] == "cdp_v1" else 0.0)
        })
        for cell in study.cells for seed in cell.seeds
    ]  # fmt: skip
    world.have("verdict", grouped(rows, study.varied))
    found = {each.group.config["optim.name"]: each for each in world.standings("verdict")}
    assert found["nadamw"].found.difference.mean == pytest.approx(0.2, abs=0.01), "against dp with nadamw"
    assert found["nadamw"].verdict == "worse"
    assert found["muon"].found.difference.mean == pytest.approx(-0.1, abs=0.01), "against dp with muon"
    assert found["muon"].verdict == "better"
    without = [row for row in rows if (row.config["mode.name"], row.config["optim.name"]) != ("dp", "nadamw")]
    world.have("verdict", grouped(without, study.varied))
    alone = next(each for each in world.standings("verdict") if each.group.config["optim.name"] == "nadamw")
    assert (alone.found, alone.missing) == (None, "no run of dp with its optimizer"), "adamw is another optimizer"
    world.have("delay", grouped([replace(row, study=world.studies["delay"].name) for row in rows], study.varied))
    assert best_of_each_mode(world.standings("delay"))["cdp_v1"].group.config["optim.name"] == "muon", "fewer nats"


def test_the_advice_says_what_fresh_seeds_judged_and_before_that_the_best_so_far(world):
    finals = world.studies["delay-finals"]
    world.have("delay-finals", tried(finals, [BEST_AT_02, (1.2, 1.0, 0.85, 1.1), *OTHERS[1:]]))
    short = world.studies["delay-tuning"]
    for tunings in ([short, finals], [finals, short]):
        assert "in runs of full length, one seed" in advice([], tunings, world.groups, {})
    said = advice([], [short], world.groups, {})
    assert "the lowest training loss of each mode so far in short runs, with which the tuning" in said
    assert "goes on" not in said
    said = advice([], [finals], world.groups, {})
    assert (
        "resnet8 has no verdict on fresh seeds yet; the" in said
        and "`mode=cdp_v1 delay=prediction optim.lr=0.2` 0.850" in said
    )
    assert "goes on" not in said
    world.have("delay-finals", tried(finals, [(None, 0.85, 1.0, None), *OTHERS]))
    assert "`mode=dp optim.lr=0.1` 0.850 (tuning goes on)" in advice([], [finals], world.groups, {})
    world.have("delay-finals", tried(finals, [BEST_AT_02, *OTHERS]))
    rows = lambda number, seed: 90.0 - 0.5 * number + 0.001 * seed * number  # noqa: E731 - data parallelism is number 0
    world.have("delay", compared(world.studies["delay"], rows))
    said = advice(world.standings("delay"), [finals], world.groups, {})
    assert (
        "resnet8 has no verdict on fresh seeds yet; so far, on the seeds that chose it" in said
        and "training loss" not in said
    )
    assert "`mode=cdp_v1 delay=prediction optim.lr=0.2` -0.50 [" in said and "nesterov" not in said, "the better alone"
    begun = world.judge(0, 1.0, keep=lambda number, seed: seed < 12)
    assert advice([*world.standings("delay"), *begun], [finals], world.groups, {}) == said, (
        "some fresh seeds judge nothing"
    )
    said = advice([*world.standings("delay"), *world.judge(0, 1.0)], [finals], world.groups, {})
    assert "not judged" not in said
    used = r"Use `mode=cdp_v1 delay=prediction optim\.lr=\S+`: it is within 0\.3 points of data parallelism with sgd \("
    assert re.match(used, said) and re.search(r"; p = \S+, corrected for 2 settings \S+\)\.", said)
    assert re.search(r"`mode=cdp_v2 delay=compensation [^`]+` is less accurate than data parallelism with sgd \(", said)
    setting = setting_of(world.studies["verdict"].cells[1].settings)
    timed = advice(world.judge(0, 1.0), [], {}, {("digits", setting): "1.02 (1.00 to 1.05)"})
    assert timed.count("; step time 1.02 (1.00 to 1.05) of dp's)") == 1
    again = advice([*world.judge(0, 1.0)][::-1], [finals], world.groups, {})
    assert again.startswith(said.partition("` ")[0]), "what can be used comes first"
    assert advice([], [], {}, {}) == "Not measured yet."


def test_where_accumulation_shrinks_micro_batches_the_table_says_so():
    by_name = {study.name: " ".join(_notes(study)) for study in CIFAR10.studies()}
    assert "over which BatchNorm takes its statistics" in by_name["cifar10-delay"]
    assert "over which BatchNorm takes its statistics" not in by_name["cifar10-verdict"]


def test_times_are_of_the_bench_and_a_damaged_file_is_refused(tmp_path):
    assert read_times(tmp_path) == {}
    path = tmp_path / "bench" / "methods.json"
    path.parent.mkdir()
    ratio = {"median": 1.023, "quartile_low": 1.0, "quartile_high": 1.05}
    setting = ["cdp_v1", "sgd", "False", "none", "1"]
    path.write_text(json.dumps({"rows": [{"dataset": "cifar10", "setting": setting, "over_dp": ratio}]}))
    assert read_times(tmp_path) == {("cifar10", tuple(setting)): "1.02 (1.00 to 1.05)"}
    path.write_text('{"rows": [1]}')
    with pytest.raises(RowError, match=r"methods\.json is damaged .*restore it from git"):
        read_times(tmp_path)
