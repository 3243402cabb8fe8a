"""Quick to answer: before a command works it imports nothing that takes seconds. Modules are counted, not seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from report_rows import row_of

from cdp_repro.report.build import build, write
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.rows import write_row

SLOW = {
    "torch",
    "torchvision",
    "timm",
    "wandb",
    "matplotlib",
    "scipy",
    "sklearn",
    "numpy",
    "PIL",
    "safetensors",
}
"""Packages that take a good part of a second each, or seconds."""

MOST = 900
"""Modules that an answer may import; with torch there are thousands."""

_CALL = """
import json, sys
from importlib import import_module
code = import_module(sys.argv[2]).main(sys.argv[3:])
with open(sys.argv[1], "w") as file:
    json.dump([code, sorted(sys.modules)], file)
"""


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Run a command in a process of its own; return its exit code and what it has imported."""
    monkeypatch.chdir(tmp_path)

    def call(command: str, *arguments: str, **variables: str) -> tuple[int, set[str]]:
        words = [sys.executable, "-c", _CALL, "imported.json", f"cdp_repro.cli.{command}", *arguments]
        subprocess.run(words, check=True, capture_output=True, env={**os.environ, **variables})
        code, modules = json.loads((tmp_path / "imported.json").read_text())
        return code, set(modules)

    return call


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("train", ["--help"], 0),
        ("train", ["optm.lr=1"], 2),
        ("train", ["mode=cdp_v3", "workers=0"], 2),
        ("train", ["mode=[[0,1],[1,0]]", "workers=2"], 2),
        ("train", ["--mutlirun"], 2),
        ("train", ["resume=nothing"], 2),
        ("train", ["-m", "mode=glob(cdp*)", "seeed=range(2)"], 2),
        ("train", ["--cfg", "job"], 0),
        ("plan", ["--help"], 0),
        ("plan", ["batch_size=30"], 2),
        ("verify", ["--steps=1"], 2),
        ("report", ["--help"], 0),
        ("report", ["check", "--results=nowhere"], 2),
        ("report", ["sweep"], 2),
        ("export", ["--help"], 0),
    ],
)
def test_answers_import_nothing_slow(called, command, arguments, expected):
    code, modules = called(command, *arguments)
    assert code == expected
    assert not SLOW & modules
    assert len(modules) < MOST


def test_completion_imports_nothing_slow(called):
    _, modules = called("train", "-sc", "query=bash", COMP_LINE="cdp-train mode=", COMP_POINT="15")
    assert not SLOW & modules


def test_a_plan_imports_what_it_computes_with_and_no_more(called, tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, modules = called("plan", **cache)
    assert code == 0
    assert {"torch"} <= SLOW & modules <= {"torch", "torchvision", "numpy", "PIL"}
    for words in ([], ["mode=cdp_v1", "slot_order=backward_first"], ["price=true", "cluster.flops_per_second=1e12"]):
        code, modules = called("plan", *words, **cache)
        assert code == 0
        assert not SLOW & modules, "the model was cut before"


def test_a_check_of_the_report_imports_no_torch(called, tmp_path):
    for cell in STUDIES["digits"].cells:
        write_row(row_of(cell), tmp_path / "results" / "rows")
    write(build(tmp_path / "results"))
    code, modules = called("report", "check")
    assert code == 0
    assert SLOW & modules <= {"matplotlib", "scipy", "numpy", "PIL"}
    assert not {"scipy.stats", "matplotlib.pyplot"} & modules


_CONSOLE_SCRIPT = """
import sys
from cdp_repro.cli import entry

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
sys.exit(entry.plan())
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], 0), (["workers=0"], 2), (["--cfg", "job"], 0), (["--info", "config", "workers=2"], 0)],
)
def test_a_plan_ends_without_taking_python_apart_and_loses_no_words(arguments, expected):
    """Freeing torch's modules takes about a second, and a plan leaves nothing open."""
    script = [sys.executable, "-c", _CONSOLE_SCRIPT, *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=buffered)
    assert done.returncode == expected
    said = done.stderr if expected else done.stdout
    assert "workers" in said
    assert said.endswith("\n")
    assert "taken apart" not in done.stdout
