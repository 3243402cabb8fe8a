"""What `cdp-report status` says of each run."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY

from cdp_repro.cli import train
from cdp_repro.studies.collecting import collect
from cdp_repro.studies.locked_log import log_path
from cdp_repro.studies.missing_runs import run_directory
from cdp_repro.studies.rows import RowError, write_row
from cdp_repro.studies.status import status_text
from cdp_repro.studies.study import Cell, Study

STUDY = Study("tiny", "accuracy", "", (Cell(("mode=dp", *TINY), seeds=(0, 1)),))
RUNS, RESULTS = Path("runs/studies"), Path("results")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train.main([*STUDY.cells[0].arguments(0), f"run_dir='{path}'"]) == 0
    return path


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """The finished run in its place in a new folder."""
    monkeypatch.chdir(tmp_path)
    path = run_directory(RUNS, "tiny", STUDY.cells[0], 0)
    shutil.copytree(finished, path)
    return path


def shown() -> list[str]:
    """Return the line of the first run."""
    text = status_text([STUDY], RUNS, RESULTS)
    assert text.splitlines()[0].split() == ["study", "run", "state", "progress", "log"]
    first, second = text.splitlines()[1:3]
    assert second.split()[-3:] == ["missing", "-", "-"]
    assert text.endswith("\n") and "\n\n2 runs: " in text and " missing\n" in text
    return [part for part in first.split("  ") if part.strip()]


def change_status(run: Path, status: str | None) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    path.unlink()
    if status is not None:
        path.write_text(json.dumps({**summary, "status": status}))


def state() -> str:
    return shown()[2].strip()


def test_a_run_that_is_finished_and_one_that_has_its_row(run):
    study, label, state, progress, log = map(str.strip, shown())
    assert (study, state, progress) == ("tiny", "finished", "2 of 2 epochs, step 10")
    assert label.startswith("mode=dp ") and label.endswith("seed=0") and log == str(run / "logs" / "rank0.log")
    log_path(run).write_text("printed\n")
    assert shown()[-1].strip() == str(log_path(run))
    write_row(collect(run, "tiny"), RESULTS / "rows")
    shutil.rmtree(run)
    _, _, state, progress, log = map(str.strip, shown())
    assert (state, progress, log) == ("done", "2 of 2 epochs, step 10", str(log_path(run)))


def test_a_row_of_a_run_that_has_diverged_tells_how_far_it_came(run):
    row = collect(run, "tiny")
    epochs = {key: values[:1] for key, values in row.epochs.items()}
    write_row(replace(row, summary={**row.summary, "diverged": True, "step": 7}, epochs=epochs), RESULTS / "rows")
    assert [part.strip() for part in shown()[2:4]] == ["done", "1 of 2 epochs, step 7, diverged"]


@pytest.mark.parametrize("status", ["failed", "diverged", "interrupted", "stopped"])
def test_a_run_that_has_ended_early(run, status):
    change_status(run, None if status == "stopped" else status)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:8]) + lines[8][:9])  # a kill has torn the last
    _, _, state, progress, _ = map(str.strip, shown())
    assert state == status
    assert progress == "1 of 2 epochs, step 7"


def test_a_run_that_a_process_trains(run):
    change_status(run, "interrupted")  # once, before it went on
    with (run / "logs" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert state() == "running"
        with (run / "logs" / ".lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert state() == "interrupted"
    with (run / "logs" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # to look has kept nothing


def test_a_run_that_is_about_to_make_its_directory_or_has_not_come_so_far(run):
    shutil.rmtree(run)
    with log_path(run).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert state() == "running"
    assert [part.strip() for part in shown()[2:4]] == ["missing", "-"]  # killed before it said anything
    log_path(run).write_text("error: no such data\n")
    assert state() == "failed"


def test_a_folder_in_the_place_of_a_log(run):
    log_path(run).mkdir()
    assert state() == "finished"
    shutil.rmtree(run)
    assert state() == "failed"


def test_damaged_files(run):
    (run / "summary.json").write_text("{")
    (run / "metrics.jsonl").write_text("{\n{}\n")
    assert [part.strip() for part in shown()[2:4]] == ["damaged", "-"]
    (RESULTS / "rows" / "tiny").mkdir(parents=True)
    (RESULTS / "rows" / "tiny" / "a.json").write_text("{")
    with pytest.raises(RowError, match="restore it from git"):
        status_text([STUDY], RUNS, RESULTS)


def test_a_run_is_named_by_what_it_differs_in(tmp_path):
    modes = tuple(Cell((f"mode={mode}", "epochs=3", "workers=2")) for mode in ("dp", "cdp_v1"))
    lines = status_text([Study("modes", "accuracy", "", modes)], tmp_path, tmp_path).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["modes", f"mode={mode}", "missing"] for mode in ("dp", "cdp_v1")
    ]
    assert lines[-1] == "2 runs: 2 missing"
