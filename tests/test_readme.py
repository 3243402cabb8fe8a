"""The README is true: its commands run, their output is what it shows, its Python runs, its tables are the results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402 - found by the path above
import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(readme.blocks(TEXT))


def without_numbers(output: str) -> str:
    """Leave out what may differ from run to run: numbers, paths, what a data set says of its size."""
    return re.sub(r"\S*/\S*|\([^)]*\)|[\d.]+(e-?\d+)?( [KMG]iB| bytes)?", "#", output).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder with a tiny CIFAR-10 as an image tree in data/."""
    base = tmp_path_factory.mktemp("readme")
    draw = torch.Generator().manual_seed(0)
    for split, images in (("train", 13), ("test", 2)):
        for number in range(10):
            place = base / "data" / split / f"class{number}"
            place.mkdir(parents=True)
            for image in range(images):
                pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=draw).numpy()
                Image.fromarray(pixels).save(place / f"{image}.jpg")
    return base


def test_there_are_eight_commands():
    assert len(BLOCKS) == 8


@pytest.mark.xdist_group("readme")
def test_commands_run_and_print_what_the_readme_shows(folder):
    for command, shown in BLOCKS.items():  # in order: the last resumes a run of the one before
        done = readme.run(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if command.startswith("cdp-plan"):
            assert done.stdout.strip() == shown.strip(), command
        else:
            assert without_numbers(done.stdout) == without_numbers(shown), command


def test_the_python_example_runs(folder):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 21
    assert re.search(r"^\d+ bytes of activations at the peak$", done.stdout, re.MULTILINE)


def test_the_tables_are_the_committed_results():
    assert f"<!-- bench -->\n{bench.tables()}\n<!-- /bench -->" in TEXT


def test_the_picture_is_what_the_code_draws(tmp_path, monkeypatch):
    committed = (ROOT / "results" / "figures" / "timeline.svg").read_text()
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    (tmp_path / "results" / "figures").mkdir(parents=True)
    readme.draw_timeline()
    drawn = (tmp_path / "results" / "figures" / "timeline.svg").read_text()
    assert drawn.count("<path") == committed.count("<path") > 100


def test_make_targets_exist_and_call_what_the_readme_says():
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert targets == ["train", "test"]
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target}" in listed for target in (*targets, "bench", "check"))
    planned = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/cdp-train" in map(str.strip, planned.splitlines())  # make inside make prints directories, too
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_map_names_every_module_of_the_core():
    (tree,) = re.findall(r"```\nsrc/cdp_repro/\n(.*?)```", TEXT, re.DOTALL)
    named = set(re.findall(r"\w+", tree))
    core = {path.stem for part in ("schedule", "engine") for path in (ROOT / "src" / "cdp_repro" / part).rglob("*.py")}
    assert core - {"__init__"} <= named
