"""The file of simulations: what is simulated later stands beside what is there, each with its own versions."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cdp_repro.report.cost_table import simulations_of

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import simulate


def test_a_simulation_that_is_kept_keeps_its_evidence(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "RESULTS", tmp_path)
    monkeypatch.setattr(simulate, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(simulate, "_simulated", lambda workers, setting: {"devices": workers})
    for commit, sizes in (("a", ["16"]), ("b", ["16"]), ("b", ["16", "8"]), ("a", ["32"])):
        monkeypatch.setattr(simulate, "versions", lambda commit=commit: {"version/git_commit": commit})
        simulate.main(sizes)
    parts = json.loads((tmp_path / "simulated.json").read_text())["parts"]
    assert [(part["version/git_commit"], [*part["values"]]) for part in parts] == [("a", ["16", "32"]), ("b", ["8"])]
    found = simulations_of(parts)
    assert [*found] == ["8", "16", "32"] and len({len(values) for values in found.values()}) == 1
