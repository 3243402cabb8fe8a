"""The committed study of handwritten digits, trained again by the commands that anyone runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cdp_repro.cli import train as command
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.missing_runs import run_directory
from cdp_repro.studies.rows import ROWS, label_of_mode, read_rows

ROOT = Path(__file__).parents[2]
POINTS = 1.0
"""How far a top-1 may be from the committed one (3.6 of 360 test images), as other machines round otherwise."""


def by_mode(results: Path) -> dict[str, dict]:
    return {label_of_mode(row.config): row for row in read_rows(results / ROWS / "digits") if row.seed == 0}


def test_the_default_run_and_the_study_of_digits_can_be_repeated(tmp_path, monkeypatch, capsys):
    """The default run, what a newcomer gets from typing one word, is a run of the study, which trains the others."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    default = run_directory(runs, "digits", STUDIES["digits"].cells[-1], seed=0)
    assert command.main([f"run_dir={default}"]) == 0
    summary = json.loads((default / "summary.json").read_text())
    assert (summary["mode"], summary["workers"], summary["model"]) == ("cdp_v2", 4, "resnet8")
    assert summary["eval/top1_percent"] >= 97
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated"]
    assert "simulated; ratio 0.671" in capsys.readouterr().out

    study = [sys.executable, ROOT / "scripts" / "accuracy.py", "digits", "--seeds=1"]
    done = subprocess.run(
        [*study, f"--results={tmp_path}", f"--runs={runs}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" finished, ") == 2 and done.stderr.count(" collected, ") == 1
    committed, repeated = by_mode(ROOT / "results"), by_mode(tmp_path)
    assert repeated.keys() == committed.keys() == {"dp", "cdp_v1", "cdp_v2"}
    for mode, row in repeated.items():
        before, now = committed[mode].summary["eval/top1_percent"], row.summary["eval/top1_percent"]
        assert abs(now - before) <= POINTS, f"{mode}: {now} % top-1, committed {before} %"
        assert row.cell == committed[mode].cell
        assert row.activation_bytes == committed[mode].activation_bytes
        assert row.summary["staleness"] == committed[mode].summary["staleness"]
