"""The documents are true: pictures are what is drawn now, quoted actions occur, and what is named exists."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from ranks import run_ranks

import cdp_repro
from cdp_repro.config.compose import compose_config
from cdp_repro.launch import launch
from cdp_repro.schedule import Action, Program, Schedule, ScheduleError, Value
from cdp_repro.schedule.program_text import read_program, write_program
from cdp_repro.training.run import train

ROOT = Path(__file__).parents[1]
PACKAGE = Path(cdp_repro.__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))

import docs  # noqa: E402 - found by the path above

TEXTS = {path.name: path.read_text() for path in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md")}
BLOCK = re.compile(r"^```(?P<kind>[\w-]+)(?P<options>[^\n]*)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"slot (?P<slot>\d+) rank (?P<rank>\d+): (?P<action>.+)")
STEPS = 6
each_text = pytest.mark.parametrize("name", TEXTS)


def blocks(kind):
    """(file, options, lines) of all code blocks of a kind."""
    return [
        (name, block["options"].strip(), block["body"].splitlines())
        for name, text in TEXTS.items()
        for block in BLOCK.finditer(text)
        if block["kind"] == kind
    ]


@cache
def program(options):
    values = dict(option.split("=") for option in options.split())
    return Program(Schedule.build(values.pop("mode"), **{k: int(v) if v.isdigit() else v for k, v in values.items()}))


def test_pictures_are_what_the_code_draws(tmp_path):
    drawn = docs.draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in docs.FOLDER.iterdir()}
    for path in drawn:
        kept = (docs.FOLDER / path.name).read_bytes()
        if f"Matplotlib v{matplotlib.__version__}".encode() not in kept:
            pytest.skip("drawn by another version of matplotlib, whose bytes differ")
        assert path.read_bytes() == kept, f"{path.name} differs: run python scripts/docs.py"


def test_pictures_are_shown():
    shown = {name for text in TEXTS.values() for name in re.findall(r"\(figures/([\w.]+)\)", text)}
    assert shown == {path.name for path in docs.FOLDER.iterdir()}


@pytest.mark.parametrize(("name", "options", "lines"), blocks("program"))
def test_quoted_actions_occur_where_they_are_said_to(name, options, lines):
    there = {
        (str(slot.number), str(action.rank), str(action))
        for slot in program(options).slots(STEPS)
        for action in slot.actions
    }
    assert lines
    for line in lines:
        match = LINE.fullmatch(line)
        assert match and match.groups() in there, f"{name}: {line}"


@pytest.mark.parametrize(("name", "options", "lines"), blocks("program-file"))
def test_quoted_files_are_what_is_written(name, options, lines):
    left = iter(write_program(program(options)).splitlines())
    for line in lines:
        assert line == "..." or line in left, f"{name}: {line}"  # `in` goes on from the line before


def test_every_kind_of_block_with_actions_is_there():
    assert len(blocks("program")) >= 4
    assert len(blocks("program-file")) == 1


def test_the_edit_by_hand_is_accepted_and_without_its_first_line_refused_as_told():
    text = TEXTS["program-files.md"]
    moved = re.findall(r"^  5  .*\n", text, re.MULTILINE)
    whole = write_program(program("mode=cdp_v2 workers=2 stages=2 placement=replicated"))
    fill = whole.index("fill 1")
    before, after = whole[:fill], whole[fill:]
    late = [line.replace("  5  ", "  6  ") for line in moved]
    assert len(moved) == 2
    assert all(line in after.partition("period")[0] for line in late)
    rank, line, rest = after.partition("  6  R g1[2:3]<0: -> g1[2:3]\n")
    for each in late:
        rest = rest.replace(each, "", 1)
    read_program(before + rank + "".join(moved) + line + rest)
    with pytest.raises(ScheduleError) as refusal:
        read_program(before + after.replace(late[0], "", 1))
    told = text[text.index("line 58:") :].splitlines()
    assert str(refusal.value).splitlines()[: told.index("...")] == told[: told.index("...")]


def test_the_example_of_an_extension_is_the_one_that_is_tested():
    tested = (ROOT / "tests" / "test_extension.py").read_text().splitlines()
    shown = [lines for name, _, lines in blocks("python") if name == "CONTRIBUTING.md"]
    code = {line.split("  #")[0] for lines in shown for line in lines if line.strip() and "engine = " not in line}
    assert len(code) > 20
    assert not {line for line in code if line not in tested and f"    {line}" not in tested}


def documented(title):
    """Return the keys in the tables of a part of the page about run directories."""
    part = TEXTS["run-directory.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", part, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


TEXT = ("dataset=text", "model=gpt", "model.width=8", "model.depth=2", "model.heads=2", "model.context=16", "workers=2",
        "batch_size=8", "optim.warmup_epochs=0", "epochs=1", "wandb=disabled", "log_every_steps=1")  # fmt: skip


def test_the_numbers_of_a_run_are_those_that_are_documented(tmp_path, tiny):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 200)
    rows, summaries = set(), set()
    for number, overrides in enumerate(
        [
            (*tiny, "placement=pipeline", "workers=2", "delay=prediction"),
            (*tiny, "mode=dp", "baseline=ddp", "workers=2"),
            (*TEXT, f"dataset.root={tmp_path / 'text.txt'}"),
        ]
    ):
        config, run_dir = compose_config([*overrides]), tmp_path / str(number)
        launch(train, (config, run_dir, ["test"]), config.processes, imports=["torch._dynamo"])
        rows |= {key for line in (run_dir / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
        summaries |= {*json.loads((run_dir / "summary.json").read_text())}
    assert rows == documented("metrics.jsonl") | {"step", "epoch"}
    of_others = {"memory/cuda_allocator_peak_bytes"} | {key for key in rows if key.startswith("eval/")}
    assert summaries - of_others == documented("summary.json") - of_others


def test_python_in_the_documents_runs():
    names = {}
    for name in ("program-files.md", "coming-from-a-training-loop.md"):
        names[name] = {}
        for lines in (lines for each, options, lines in blocks("python") if each == name and not options):
            exec("\n".join(lines), names[name])
    written = names["program-files.md"]
    assert write_program(written["program"]) == written["text"]
    changed = names["coming-from-a-training-loop.md"]["engine"]
    assert changed.step == 10 and changed.model()[0][0].weight.abs().max() <= 0.5


def test_the_data_set_of_the_documents_is_one(tmp_path):
    names = {}
    ((_, _, lines),) = (block for block in blocks("python") if block[0] == "extending.md" and "def load" in str(block))
    exec("\n".join(lines), names)
    for split, size in (("train", 8), ("test", 4)):
        images = np.arange(size * 2 * 9).reshape(size, 2, 3, 3).astype(np.uint8)
        np.savez(tmp_path / split, images=images, labels=np.arange(size) % 4)
    data = names["load"](tmp_path)
    assert (data.train_size, data.description) == (8, "my data")


def of_torchrun():
    """Run, on one of several ranks, what the documents show for `torchrun`; return what it leaves."""
    ((_, _, lines),) = (block for block in blocks("python") if block[1] == "torchrun")
    names = {}
    exec("\n".join(lines), names)
    return names["engine"].rank, names["engine"].step, [*names["model"].parameters()]


def test_python_in_the_documents_runs_on_several_ranks(tmp_path):
    (rank, step, first), (other, _, second) = run_ranks(of_torchrun, 2, folder=tmp_path, joins=True)
    assert (rank, other, step) == (0, 1, 10)
    assert all(map(torch.equal, first, second))


def test_actions_in_the_table_of_program_files_are_such_as_programs_have():
    """Up to their numbers: an action reads, writes and frees what one of these programs has it read, write and free."""
    programs = [
        Program(Schedule.build("cdp_v2", 4, placement="replicated")),
        Program(Schedule.build("cdp_v2", 3, placement="pipeline")),
        Program(Schedule.build("dp", 4, placement="replicated", collectives=True)),
        Program(Schedule.build("zero_bubble", 3, placement="pipeline")),
    ]
    slots = [slot for each in programs for slot in each.slots(3)]
    written = {re.sub(r"\d+", "#", str(action)) for slot in slots for action in slot.actions}
    shown = re.findall(r"^\| `([^`]+ ->[^`]*)` \|", TEXTS["program-files.md"], re.MULTILINE)
    assert len(shown) == 9
    for text in shown:
        assert re.sub(r"\d+", "#", text) in written, text


@each_text
def test_actions_and_values_in_tables_are_the_documented_text(name):
    for row in re.findall(r"^\| (`[^|]+) \|", TEXTS[name], re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", row):
            if " ->" in text:
                assert str(Action.parse(text)) == text
            elif re.fullmatch(r"[xsdgpb][fb]?\d.*", text):
                assert str(Value.parse(text)) == text


@each_text
def test_tests_that_are_named_exist(name):
    for path, test in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", TEXTS[name]):
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test


@each_text
def test_files_and_links_exist(name):
    folder = ROOT if name == "CONTRIBUTING.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXTS[name]):
        assert (folder / link).is_file(), link
    packages = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in "_.")
    for path in re.findall(rf"`((?:{packages})/[\w/.]*)`", TEXTS[name]):
        found = PACKAGE / path
        assert found.exists() or found.with_suffix(".py").is_file(), path


def test_the_tree_names_every_module_of_the_core_and_nothing_else():
    ((_, _, lines),) = blocks("tree")
    named = {word.rstrip("/") for line in lines for word in re.split(r" {2,}", line.strip())[0].split()}
    modules = {path.stem for part in ("schedule", "trace", "engine") for path in (PACKAGE / part).rglob("*.py")}
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert modules - {"__init__"} | packages <= named
    assert named <= {path.stem for path in PACKAGE.rglob("*")}
