"""The kill test in short: one set-up, killed in three moments; and its table in the documentation."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from cdp_repro.training.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import kill  # noqa: E402 - found by the path above

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the processes of the ranks")


@linux
def test_a_run_that_is_killed_goes_on_bitwise(tmp_path):
    settings = kill.set_ups()["pipeline: cdp_v2"]
    moments = [("training", 3, "rank"), ("checkpoint", 4, "tree"), ("evaluation", 5, "launcher")]
    found = kill.trial(settings, tmp_path / "trial", moments)
    assert [(each["victim"], each["problem"]) for each in found] == [(victim, "") for _, _, victim in moments]


@linux
def test_a_run_that_never_comes_to_its_moment_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(kill, "LIMIT_SECONDS", 0.5)
    found = kill.trial(kill.set_ups()["single_device: dp"], tmp_path / "trial", [("training", 3, "tree")])
    assert found[0]["problem"] == "it did not come to training in 0.5 s" and not found[0]["equal"]


def of_run(folder: Path, weight: float) -> Path:
    CheckpointStore(folder / "checkpoints").save(3, {"engine": {"weight": torch.full((2,), weight)}}, {})
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "time": weight, "train/loss": 0.5}) + "\n")
    return folder


def test_the_comparison_sees_one_bit(tmp_path):
    one, same, other = (of_run(tmp_path / name, w) for name, w in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)))
    assert kill.difference(one, same) == ""
    assert kill.difference(one, other) == "1 tensors differ, such as /engine/weight"
    (same / "metrics.jsonl").write_text('{"step": 3, "time": 1, "train/loss": 0.25}\n')
    assert kill.difference(one, same) == "the rows of the metrics differ"


def test_a_hundred_kills_take_turns_over_moments_and_victims():
    kills = [kill.moments_of(number) for number in range(len(kill.set_ups()))]
    made = Counter((moment, victim) for each in kills for moment, _, victim in each)
    assert sum(made.values()) >= 100
    assert len(made) == len(kill.MOMENTS) * len(kill.VICTIMS) and min(made.values()) >= 7


def test_the_table_counts_kills_and_what_went_wrong():
    def found(moment, victim, equal):
        return {"moment": moment, "victim": victim, "seconds_until_all_ended": 1.5, "equal": equal, "problem": ""}

    results = {
        "command": "python scripts/kill.py",
        "set_ups": {
            "zero: dp": {**EVIDENCE, "kills": [found("training", "rank", True)]},
            "zero: cdp_v1": {**EVIDENCE, "kills": [found("training", "tree", False)], "version/git_commit": "1" * 40},
        },
    }
    lines = kill.table(results).splitlines()
    assert lines[2] == "| zero | - | 1 of 2 | - | - | 1 of 2 |"
    assert "2 set-ups; killed: 1 times the whole tree of processes, 0 the launching process, 1 one rank" in lines[-2]
    assert lines[-1] == f"`python scripts/kill.py`, commit {'0' * 12} and {'1' * 12}, torch 2, Python 3, a CPU."


def test_a_result_that_is_kept_keeps_its_evidence(tmp_path, monkeypatch):
    name = next(iter(kill.set_ups()))
    monkeypatch.setattr(kill, "trial", lambda _, folder, moments: folder.mkdir() or [{"victim": "tree"}])
    monkeypatch.setattr(kill, "versions", lambda: EVIDENCE)
    first = kill.kept_trial(name, tmp_path)
    monkeypatch.setattr(kill, "versions", lambda: {**EVIDENCE, "version/git_commit": "1" * 40})
    assert kill.kept_trial(name, tmp_path) == first == {**EVIDENCE, "kills": [{"victim": "tree"}]}


def test_the_documentation_shows_the_results():
    text = kill.DOCUMENT.read_text()
    results = json.loads(kill.RESULTS.read_text()) if kill.RESULTS.exists() else None
    assert text == (kill.renewed(text, results) if results else text)
    assert kill.renewed(text, EXAMPLE) != text, "the marks are there"


EVIDENCE = {"version/git_commit": "0" * 40, "version/torch": "2", "version/python": "3", "hardware": "a CPU"}
EXAMPLE = {
    "command": "",
    "set_ups": {
        "zero: dp": {
            **EVIDENCE, "kills": [{"moment": "training", "victim": "rank", "seconds_until_all_ended": 1, "equal": True}]
        }
    },
}  # fmt: skip
