"""The default run: what a newcomer gets from typing one word."""

from __future__ import annotations

import json
from pathlib import Path

from cdp_repro.cli import train as command


def test_the_default_run_reaches_97_percent_and_shows_both_peaks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["run_dir=run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["mode"], summary["workers"], summary["model"]) == ("cdp_v2", 4, "resnet8")
    assert summary["eval/top1_percent"] >= 97
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated"]
    assert "simulated; ratio 0.671" in capsys.readouterr().out
