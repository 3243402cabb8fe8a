"""What delay costs: winners of the tuning, differences, verdicts, and the claim that rests on them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from report_rows import row_of

from cdp_repro.report import delay_costs
from cdp_repro.report.claims import FAILS, HOLDS, PARTLY, UNKNOWN, claims
from cdp_repro.report.delay_costs import best_rates, delay_table, delay_tuning_table, method_of, setting_of, verdicts
from cdp_repro.report.groups import grouped
from cdp_repro.studies.delay_studies import CIFAR10, FRESH_SEEDS, TEXT, TUNING_SEED
from cdp_repro.studies.rows import read_rows

ROWS = Path(__file__).resolve().parents[2] / "results" / "rows"

SETTINGS = (
    "mode=dp",
    "mode=cdp_v1 delay=prediction",
    "mode=cdp_v2 delay=compensation",
    "mode=cdp_v1 optim.nesterov=true",
)
SMALL = replace(
    CIFAR10, base="dataset=digits epochs=2", settings=SETTINGS, grid=(0.05, 0.1, 0.2, 0.4), seeds=(0, 1, 2),
    finalists=dict.fromkeys(SETTINGS, (0.1, 0.2)), rates=dict.fromkeys(SETTINGS, 0.2), best=SETTINGS[1:3],
)  # fmt: skip
TUNING, FINALS, DELAY, VERDICT = SMALL.studies()
STATE = {"memory/optimizer_bytes_per_device": 2**20, "memory/delay_bytes_per_device": 2**21}


def tuned(study, losses):
    """Groups of a tuning or its finals; `losses` by setting, in the order of the rates; None has not run."""
    flat = [loss for of_setting in losses for loss in of_setting]
    rows = [
        row_of(cell, TUNING_SEED, study.name, **({"diverged": True} if loss == inf else {"train/loss": loss}))
        for cell, loss in zip(study.cells, flat, strict=True) if loss is not None
    ]  # fmt: skip
    return grouped(rows, study.varied)


def compared(study, top1):
    """Groups of a comparison; `top1(number of the cell, seed)`."""
    rows = [
        row_of(cell, seed, study.name, top1(number, seed), **STATE)
        for number, cell in enumerate(study.cells) for seed in cell.seeds
    ]  # fmt: skip
    return grouped(rows, study.varied)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(delay_costs, "STUDIES", {study.name: study for study in (TUNING, FINALS, DELAY, VERDICT)})


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
            assert len(finals.cells) == 2 * len(benchmark.settings), "two of each setting, none is favoured"
        used = {seed for other in others if other.kind == "delay" for cell in other.cells for seed in cell.seeds}
        assert TUNING_SEED not in used and not {*FRESH_SEEDS} & {*benchmark.seeds}


def test_the_settings_are_those_that_the_literature_names():
    def methods(study):
        return {(cell.settings["mode.name"], method_of(cell.settings)) for cell in study.cells}

    cifar10, text = (methods(next(benchmark.studies())) for benchmark in (CIFAR10, TEXT))
    for mode in ("cdp_v1", "cdp_v2"):
        assert {(mode, f"sgd{each}") for each in ("", " nesterov", " + error_feedback", " + prediction")} <= cifar10
        assert {(mode, f"adamw{each}") for each in ("", " + error_feedback", " + prediction")} <= text
        assert (mode, "nadamw") in text
    assert {
        ("cdp_v2", "sgd, accumulate 2"),
        ("cdp_v2", "sgd, accumulate 4"),
        ("cdp_v1", "sgd + compensation"),
    } <= cifar10
    assert {("dp", "muon"), ("cdp_v1", "muon"), ("cdp_v1", "muon + error_feedback")} <= text


@pytest.mark.parametrize("benchmark", [CIFAR10, TEXT], ids=lambda benchmark: benchmark.name)
def test_what_goes_on_is_what_the_committed_rows_chose(benchmark):
    tuning, *later = benchmark.studies()
    keys = [setting_of(cell.settings) for cell in tuning.cells[:: len(benchmark.grid)]]
    entered = [benchmark.finalists, {setting: (rate,) for setting, rate in benchmark.rates.items()}]
    for study, chosen in zip([tuning, *later], entered, strict=False):
        if chosen:
            found = best_rates(grouped(read_rows(ROWS / study.name), study.varied), study)
            by_setting = dict(zip(benchmark.settings, (tuple(sorted(found[key])) for key in keys), strict=True))
            assert by_setting == {setting: tuple(sorted(rates)) for setting, rates in chosen.items()}


def test_the_best_have_the_lowest_loss_and_none_goes_on_from_the_edge_or_before_all_have_run():
    groups = tuned(TUNING, [(2.0, 1.0, 0.9, 1.1), (0.9, 0.8, 1.0, 1.1), (2.0, 1.0, 0.9, None), (2, 0.95, 0.95, 1)])
    cells = [cell.settings for cell in TUNING.cells[::4]]
    found = best_rates(groups, TUNING)
    assert found == {setting_of(cells[0]): (0.2, 0.1), setting_of(cells[1]): (), setting_of(cells[3]): (0.1, 0.2)}
    table = delay_tuning_table(groups, TUNING)
    said = {(row[0], row[1], row[2]): row[-1] for row in table.rows}
    assert [said["dp", "sgd", rate] for rate in ("0.05", "0.1", "0.2", "0.4")] == ["", "yes", "yes", ""]
    assert said["cdp_v1", "sgd + prediction", "0.05"] == "at the edge: extend the grid"
    assert table.rows[-1][3].startswith("not run: `cdp-train dataset=digits epochs=2 mode=cdp_v2 delay=compensation")
    assert table.rows[-1][3].endswith("seed=100`") and "The 2 lowest training losses" in table.notes[0]


def test_the_winner_is_that_of_the_finals_which_have_no_edge():
    groups = tuned(FINALS, [(1.0, 0.9), (0.9, 1.0), (1.0, None), (1.0, 0.9)])
    cells = [cell.settings for cell in FINALS.cells[::2]]
    assert best_rates(groups, FINALS) == {
        setting_of(cells[0]): (0.2,), setting_of(cells[1]): (0.1,), setting_of(cells[3]): (0.2,)
    }  # fmt: skip
    table = delay_tuning_table(groups, FINALS)
    assert [row[-1] for row in table.rows[:4]] == [
        "yes",
        "",
        "",
        "yes",
    ] and "The lowest training loss wins" in table.notes[0]


GOOD = [(1.0, 0.9)] * 4


def test_verdicts_come_from_fresh_seeds_and_tuned_rates_alone(known):
    def top1(number, seed):
        return 90 + 0.1 * (seed % 3) - (0, 0.05, 1.0, 0)[number] + 0.01 * ((seed + number) % 2)

    groups = compared(VERDICT, top1)
    table = delay_table(groups, VERDICT, tuned(FINALS, GOOD))
    assert [row[5] for row in table.rows] == ["", "equivalent", "worse"]
    assert [row[1] for row in table.rows] == ["sgd", "sgd + prediction", "sgd + compensation"]
    assert table.rows[1][6] == "1.00 + 2.00" and "less than 0.3 points" in " ".join(table.notes)
    assert [row[5] for row in delay_table(groups, VERDICT, ()).rows] == ["", "", ""], "rates that nobody has chosen"
    explored = delay_table(compared(DELAY, top1), DELAY, tuned(FINALS, GOOD))
    assert {row[5] for row in explored.rows} == {""} and "No verdict from here" in " ".join(explored.notes)


@pytest.mark.parametrize(
    ("lost", "verdict"), [((0.0, 0.05), HOLDS), ((0.0, 1.0), PARTLY), ((1.0, 1.0), FAILS), (None, UNKNOWN)]
)
def test_the_claim_of_accuracy_rests_on_the_verdicts(known, lost, verdict):
    def top1(number, seed):
        return 90 + 0.1 * (seed % 3) - (0, *lost)[number] + 0.01 * (seed % 2)

    groups = {} if lost is None else {VERDICT.name: compared(VERDICT, top1)}
    claim = claims((), (), (), (), verdicts(groups))[2]
    assert claim.verdict == verdict
    if lost is not None:
        assert "cdp_v1 with sgd + prediction equivalent" in claim.because or lost[0]


def test_a_text_study_is_judged_by_nats_of_which_fewer_are_better(known, monkeypatch):
    settings = ("optim=adamw mode=dp", "optim=nadamw mode=cdp_v1", "optim=muon mode=dp", "optim=muon mode=cdp_v1")
    benchmark = replace(TEXT, settings=settings, rates=dict.fromkeys(settings, 1e-3), best=settings[1:])
    tuning, _, study = benchmark.studies()
    monkeypatch.setattr(delay_costs, "STUDIES", {each.name: each for each in (tuning, study)})
    nats = {"nadamw": 1.5, "adamw": 1.4, "muon": 1.3}
    rows = [
        row_of(cell, seed, study.name, **STATE, **{
            "eval/nats_per_token": nats[cell.settings["optim.name"]] + 0.001 * (seed % 2)
            - 0.1 * (cell.settings["mode.name"] == "cdp_v1" and cell.settings["optim.name"] == "muon") + 0.0001 * seed
        })
        for cell in study.cells for seed in cell.seeds
    ]  # fmt: skip
    found = {each.group.config["optim.name"]: each for each in verdicts({study.name: grouped(rows, study.varied)})}
    assert found["nadamw"].found.difference.mean == pytest.approx(0.1), "against adamw, the first data parallelism"
    assert found["nadamw"].found.verdict == "worse"
    assert found["muon"].found.difference.mean == pytest.approx(-0.1), "against data parallelism with muon"
    assert found["muon"].found.verdict == "better"


def test_a_rate_that_diverges_is_told_and_never_wins(known):
    groups = tuned(TUNING, [(1.5, 1.0, 0.5, inf)] * len(SETTINGS))
    assert set(best_rates(groups, TUNING).values()) == {(0.2, 0.1)}, "not the largest rate, which diverges"
    table = delay_tuning_table(groups, TUNING)
    assert [row[3] for row in table.rows if row[2] == "0.4"] == ["diverged"] * len(SETTINGS)
