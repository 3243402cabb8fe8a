"""`cdp-report` as a user types it: what it refuses, and which study a run goes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdp_repro.cli import report
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.studies.rows import NEEDED, read_rows
from cdp_repro.studies.study import Cell, Study

CELL = Cell(("mode=cdp_v1", "epochs=1"))
SCORES = Study("scores", "accuracy", "a failure where it diverges", (CELL,))
RATES = Study("rates", "delay-tuning", "a result where it diverges", (CELL,))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "STUDIES", {study.name: study for study in (SCORES, RATES)})


def write_run(status: str, name: str = "run", seed: int = 0, top1: float = 50, settings=None) -> None:
    """Write a run directory, of a run of one epoch that has ended so."""
    config = replace(CELL.config, seed=seed, **settings or {})
    run = RunDirectory.create(Path(name), config.to_dict(), ["cdp-train", *CELL.overrides])
    described = dict.fromkeys(NEEDED, "said") | {"ledger/reads": 80, "step": 10, "staleness": [[1] * 4] * 4}
    numbers = {"eval/top1_percent": top1, "train/loss": 0.5, "ranks": 1, "workers": 4}
    run.write_summary({"status": status, **described, **numbers})
    row = '{"step": 1, "epoch": 1, "train/epoch_loss": 1.0}\n'
    run.metrics_path.write_text(row * config.epochs)


@pytest.mark.parametrize(("status", "study"), [("finished", "scores"), ("diverged", "rates")])
def test_a_run_goes_to_the_first_study_of_which_it_is_a_result(status, study):
    write_run(status)
    assert report.main(["collect", "run"]) == 0
    (row,) = read_rows(Path("results/rows"))
    assert (row.study, row.has_diverged) == (study, status == "diverged")
    assert report.main(["collect", "run", f"--study={study}"]) == 0, "the same row again"


def test_a_run_on_a_seed_that_no_study_plans_goes_to_none(monkeypatch, capsys):
    fresh = Study("fresh", "delay", "the same cell on other seeds", (Cell(CELL.overrides, (7, 8)),))
    monkeypatch.setattr(report, "STUDIES", {study.name: study for study in (SCORES, fresh)})
    write_run("finished", "judges", seed=8)
    assert report.main(["collect", "judges", "--study=scores"]) == 2
    assert "judges with seed=8 is no run of the study scores" in capsys.readouterr().err
    assert report.main(["collect", "judges"]) == 0
    assert [row.study for row in read_rows(Path("results/rows"))] == ["fresh"]
    write_run("finished", "neither", seed=5)
    assert report.main(["collect", "neither"]) == 2
    assert "neither with seed=5 belongs to none of the studies scores, fresh" in capsys.readouterr().err


def test_a_run_goes_to_no_study_that_does_not_list_it_but_to_one_of_the_users_own(capsys):
    write_run("finished", "neither", seed=5)
    assert report.main(["collect", "neither", "--study=scores"]) == 2
    assert "neither with seed=5 is no run of the study scores" in capsys.readouterr().err
    assert not Path("results").exists()
    assert report.main(["collect", "neither", "--study=mine"]) == 0
    assert [row.study for row in read_rows(Path("results/rows"))] == ["mine"]


def test_other_runs_of_present_rows_are_all_named_before_any_row_is_written(monkeypatch, capsys):
    monkeypatch.setattr(report, "STUDIES", {"scores": replace(SCORES, cells=(Cell(CELL.overrides, (0, 1, 2)),))})
    for seed in (0, 1, 2):
        write_run("finished", f"run{seed}", seed)
        write_run("finished", f"again{seed}", seed, top1=51)
    assert report.main(["collect", "run0", "run2"]) == 0
    before = read_rows(Path("results/rows"))
    assert report.main(["collect", "again0", "again1", "again2"]) == 2
    refused = [line for line in capsys.readouterr().err.splitlines() if "already holds a run of this cell" in line]
    assert len(refused) == 2 and "seed0" in refused[0] and "seed2" in refused[1]
    assert read_rows(Path("results/rows")) == before, "nor that of again1, which is fine"


def test_two_runs_of_one_cell_and_seed_are_refused_before_any_row_is_written(capsys):
    write_run("finished", "one")
    write_run("finished", "two", top1=51)
    write_run("finished", "same")
    assert report.main(["collect", "one", "two", "same"]) == 2
    said = capsys.readouterr().err
    assert "one and two are runs of one cell and seed, for the study scores, with other numbers: give one" in said
    assert "same" not in said and not Path("results").exists()
    assert report.main(["collect", "one", "same"]) == 0
    assert len(read_rows(Path("results/rows"))) == 1


def test_a_run_that_diverged_is_a_result_of_no_study_of_accuracy(monkeypatch, capsys):
    monkeypatch.setattr(report, "STUDIES", {"scores": SCORES})
    write_run("diverged")
    assert report.main(["collect", "run"]) == 2
    assert "run has diverged: its loss is not finite" in capsys.readouterr().err and not Path("results").exists()


def test_runs_that_no_table_could_average_are_refused_before_they_are_in_a_study(capsys):
    write_run("finished", "one")
    assert report.main(["collect", "one", "--study=mine"]) == 0
    write_run("finished", "longer", seed=1, settings={"epochs": 2})
    assert report.main(["collect", "longer", "--study=mine"]) == 2
    said = capsys.readouterr().err
    assert "would be averaged, but differ in epochs" in said and "--study=NAME" in said
    assert len(read_rows(Path("results/rows"))) == 1
    assert report.main(["collect", "longer", "--study=longer"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("collect a run b", ["/a is not a run directory", "/b is not a run directory"]),
        ("collect --study=a/b c", ["--study=a/b: use letters", "/c is not a run directory"]),
        ("collect --x=1", ["knows no --x=", "needs the directory of a finished run"]),
        (
            "sweep a b --z=1",
            ["knows no --z=: it takes --group=, --out=, --x=, --y=", "one directory of a sweep, not a b"],
        ),
        (
            "sweep a --y=b --y=c --group=d --group=e",
            ["--y= is given 2 times: give one of b, c", "--group= is given 2 times: give --group=d,e"],
        ),
        ("sweep --x --y", ["knows no --x, --y:", "one directory of a sweep, not none"]),
        ("status rate --x", ["knows no --x:", "unknown study rate: choose scores, rates"]),
    ],
)
def test_all_mistakes_are_told_at_once_and_nothing_is_written(arguments, said, capsys):
    write_run("finished")
    assert report.main(arguments.split()) == 2
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("- ")]
    assert len(problems) == len(said) and all(text in problem for text, problem in zip(said, problems, strict=True))
    assert [path.name for path in Path().iterdir()] == ["run"]


def test_a_root_without_documents_is_refused(tmp_path, capsys):
    """It passed for one whose documents are what the rows give."""
    assert report.main(["check", f"--results={tmp_path}", "--root=/nowhere"]) == 2
    assert "--root=/nowhere holds no README.md" in capsys.readouterr().err
