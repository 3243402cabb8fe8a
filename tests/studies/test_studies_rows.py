"""Rows: what a real run leaves behind, and what becomes of bad files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from cdp_repro.config.compose import compose_config
from cdp_repro.config.keys import settings_of
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule
from cdp_repro.studies import rows
from cdp_repro.studies.collecting import collect
from cdp_repro.studies.rows import RowError, cell_hash, read_row, read_rows, write_row
from cdp_repro.training.run import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of two epochs."""
    overrides = [
        "mode=cdp_v1", "workers=2", "dataset=synthetic", "dataset.image_size=8", "dataset.train_samples=80",
        "dataset.test_samples=20", "model=mlp", "batch_size=16", "epochs=2", "wandb=disabled", "seed=7",
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("run") / "run"
    train(compose_config(overrides), path, ["cdp-train", *overrides, f"run_dir={path}"])
    return path


@pytest.fixture(scope="module")
def row(run_dir):
    return collect(run_dir, "mine")


def test_a_row_holds_what_ran(run_dir, row):
    trace = simulate(Program(Schedule.build("cdp_v1", 2)), row.costs, 3)
    compute = [
        [a[:5] for record in trace.records if record.slot == slot for a in record.actions if a.op.is_compute]
        for slot in range(len(row.actions))
    ]
    assert [[a[:5] for a in slot.actions] for slot in row.slots()] == compute, "op, rank, stage, micro-batch, version"
    full = list(trace.activation_bytes_per_slot.values())[: len(row.activation_bytes)]
    assert list(row.activation_bytes) == full
    assert row.seed == 7 and row.epochs["epoch"] == [0, 1] and len(row.epochs["eval/top1_percent"]) == 2
    assert row.summary["memory/parameter_peak_bytes_per_device"] == 2 * sum(row.costs.parameter_bytes)
    assert row.summary["eval/top1_percent"] == json.loads((run_dir / "summary.json").read_text())["eval/top1_percent"]


def test_a_row_holds_no_path_and_reads_back_as_it_was(tmp_path, run_dir, row):
    path = write_row(row, tmp_path)
    text = path.read_text()
    assert str(run_dir) not in text and "run_dir" not in text
    assert "cdp-train mode=cdp_v1 workers=2" in row.command and "wandb" not in row.command
    assert path.parent.name == "mine" and path.name == f"synthetic-mlp-cdp_v1-single_device-N2-seed7-{row.cell}.json"
    assert read_rows(tmp_path) == [row] and len(text) < 20_000
    assert write_row(row, tmp_path) == path and path.read_text() == text


def test_another_run_of_the_same_cell_and_seed_is_refused(tmp_path, row):
    path = write_row(row, tmp_path)
    before = path.read_text()
    with pytest.raises(RowError, match=r"already holds a run .*summary\.eval/top1_percent: .* there, -1 now"):
        write_row(replace(row, summary={**row.summary, "eval/top1_percent": -1}), tmp_path)
    assert path.read_text() == before


def test_a_run_that_went_on_on_another_placement_is_filed_under_that_on_which_it_ended(tmp_path, run_dir, row):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    summary = json.loads((copy / "summary.json").read_text())
    ended = summary["config"] | {"placement": {"name": "pipeline"}, "ranks": 2}
    (copy / "summary.json").write_text(json.dumps(summary | {"config": ended}))
    moved = collect(copy, "mine")
    assert (moved.config["placement.name"], moved.config["ranks"]) == ("pipeline", 2) and moved.cell != row.cell
    assert moved.command == f"{row.command} placement=pipeline ranks=2"
    (copy / "command.txt").write_text("cdp-train placement=replicated ranks=4 model=mlp\n")
    assert collect(copy, "mine").command == "cdp-train model=mlp placement=pipeline ranks=2"


def test_a_run_of_an_older_version_whose_summary_has_no_configuration_is_filed_as_it_began(tmp_path, run_dir, row):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    summary = json.loads((copy / "summary.json").read_text())
    del summary["config"]
    (copy / "summary.json").write_text(json.dumps(summary))
    assert collect(copy, "mine") == row


def test_a_run_that_went_on_under_a_name_that_is_no_text(tmp_path, run_dir, row):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    RunDirectory.open(copy).add_command(["cdp-train", "resume=\udcff"])
    assert (copy / "command.txt").read_bytes().endswith(b"\ncdp-train 'resume=\xff'\n")
    assert collect(copy, "mine") == row


@pytest.mark.parametrize("status", [{"status": "interrupted"}, None])
def test_an_unfinished_run_is_refused_with_the_way_out(tmp_path, run_dir, status):
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    if status:
        (unfinished / "summary.json").write_text(json.dumps(status))
    with pytest.raises(RowError, match=f"finish it by cdp-train resume={unfinished}"):
        collect(unfinished, "mine")


def test_metrics_that_lack_an_epoch_are_refused(tmp_path, run_dir):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"epoch": 1, "train/epoch_loss"' not in line))
    with pytest.raises(RowError, match=r"ends of 1 epochs, the run has 2.*train again"):
        collect(copy, "mine")


@pytest.mark.parametrize(
    ("name", "content"),
    [("command.txt", None), ("command.txt", ""), ("metrics.jsonl", None), ("memory.csv", "slot\n1\n"),
     ("comms.csv", "slot,bytes\none,two\n"), ("trace.json", "{"),
     ("trace.json", '{"traceEvents": [{"cat": "forward"}]}')],
)  # fmt: skip
def test_a_run_directory_that_lacks_a_file_or_holds_a_damaged_one_is_named(tmp_path, run_dir, name, content):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_text(content)
    with pytest.raises(RowError, match=f"^{copy} is damaged .*put back what it held, or train again"):
        collect(copy, "mine")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-40], "cannot be read"),
        (lambda text: text.replace('"seed": 7', '"seed": 8'), "is damaged, its digest differs"),
        (lambda text: '{"a": 1}', "is not a row of format 1"),
        (lambda text: "[]", "is not a row of format 1"),
    ],
)
def test_a_damaged_or_foreign_row_is_named(tmp_path, row, damage, message):
    path = write_row(row, tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RowError, match=message) as caught:
        read_row(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", [{"extra": 1}, {"summary": None}])
def test_a_row_of_another_version_is_named(tmp_path, row, change):
    path = write_row(row, tmp_path)
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("format", "digest")}
    content = {key: value for key, value in {**content, **change}.items() if value is not None}
    path.write_text(json.dumps({"format": rows.FORMAT, "digest": rows._digest(content), **content}))
    with pytest.raises(RowError, match=r"is a row of another version .*: remove it, and collect the run again") as told:
        read_row(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("key", ["hardware", "version/torch", "train/loss", "eval/top1_percent"])
def test_a_row_that_lacks_what_tables_need_is_of_another_version(tmp_path, row, key):
    summary = {name: value for name, value in row.summary.items() if name != key}
    path = write_row(replace(row, summary=summary), tmp_path)
    with pytest.raises(RowError, match=f"is a row of another version .its summary lacks {key}.: remove it") as told:
        read_row(path)
    assert str(path) in str(told.value)


def test_a_row_of_a_run_that_has_diverged_needs_no_numbers_of_its_end(tmp_path, row):
    ends = ("train/loss", "eval/top1_percent")
    summary = {name: value for name, value in row.summary.items() if name not in ends} | {rows.DIVERGED: True}
    assert read_row(write_row(replace(row, summary=summary), tmp_path)).has_diverged


def test_all_problems_of_a_folder_are_named_at_once(tmp_path, row):
    path = write_row(row, tmp_path)
    twin = path.with_name("twin.json")
    twin.write_text(path.read_text())
    foreign = tmp_path / "other" / path.name
    foreign.parent.mkdir()
    foreign.write_text(path.read_text())
    (tmp_path / "mine" / "x.json").write_text("{")
    with pytest.raises(RowError) as caught:
        read_rows(tmp_path)
    text = str(caught.value)
    assert "are the same cell with the same seed" in text and "is of the study 'mine'" in text and "x.json" in text


def test_a_folder_that_cannot_be_written_is_named(tmp_path, row):
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(RowError, match="cannot write"):
        write_row(row, tmp_path)


def test_a_setting_at_its_default_does_not_enter_the_hash_of_a_cell():
    """So that a setting that is added to the configuration changes no cell."""
    settings = settings_of({"mode": {"name": "dp"}})
    assert cell_hash({**settings, "collectives": False}) == cell_hash(
        {key: value for key, value in settings.items() if key != "collectives"}
    )
    assert cell_hash({**settings, "collectives": True}) != cell_hash(settings)
