"""The README and docs/ are true: commands run and print what is shown, Python runs, tables are the results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from cdp_repro.config import ConfigError
from cdp_repro.schedule.modes import MODES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import readme  # noqa: E402 - found by the path above
from benches.tables import RESULTS, tables  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [block for path in readme.WITH_COMMANDS for block in readme.blocks(path.read_text())]


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


def test_the_readme_is_short_and_shows_six_commands():
    assert TEXT.count("\n") <= 170
    assert len([*readme.blocks(TEXT)]) == 6


def test_the_readme_names_each_mode():
    rows = TEXT[TEXT.index("## Schedules") : TEXT.index("## Results")]
    assert set(MODES) <= set(re.findall(r"`(\w+)`", rows))


def test_every_page_with_commands_is_run():
    found = {path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "```console" in path.read_text()}
    assert found == set(readme.WITH_COMMANDS)


def run_once(command, folder):
    """Run a command line; what it pipes is not computed again where two lines show parts of the same output."""
    program, _, reader = command.partition(" | ")
    if [line.partition(" | ")[0] for line, _ in COMMANDS].count(program) < 2:
        return readme.run(command, folder)
    output = folder / f"output-{zlib.crc32(program.encode())}.txt"
    if not output.exists():
        done = readme.run(program, folder)
        if done.returncode:
            return done
        output.write_text(done.stdout)
    return readme.run(f"cat {output} | {reader or 'cat'}", folder)


def test_commands_run_and_print_what_the_documents_show(folder):
    for command, shown in COMMANDS:  # in order: some go on from runs of others
        done = run_once(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if command.startswith("cdp-plan"):
            assert done.stdout.strip() == shown.strip(), command
        else:
            assert without_numbers(done.stdout) == without_numbers(shown), command
    (example,) = re.findall(r"```python weights\n(.*?)```", (ROOT / "docs" / "commands.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", example], cwd=folder, check=True)  # the file is there now


def test_the_python_example_runs(folder):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 21
    assert re.search(r"^\d+ bytes of activations at the peak$", done.stdout, re.MULTILINE)


def test_the_tables_are_the_committed_results():
    assert f"<!-- bench -->\n{tables()}\n<!-- /bench -->" in readme.WITH_TABLES.read_text()


def test_the_benches_were_run_on_commits_without_other_changes():
    results = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    assert len(results) > 5
    assert not [name for name, result in results.items() if result["version/git_commit"].endswith("-dirty")]


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
    env = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}

    def make(*words):  # as from a shell, though `make test ARGS=...` may have started the tests
        return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout

    listed = make("help")
    assert all(f"make {target}" in listed for target in (*targets, "bench", "check"))
    assert ".venv/bin/cdp-train" in map(str.strip, make("-n", "train").splitlines())
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_output_of_a_command_that_fails_is_not_written_into_a_document(tmp_path):
    with pytest.raises(ConfigError, match=r"echo no; false ended with exit code 1:\nno"):
        readme.with_outputs("```console\n$ echo no; false\nyes\n```", tmp_path)
    assert readme.with_outputs("```console\n$ echo no\nyes\n```", tmp_path) == "```console\n$ echo no\nno\n```"
