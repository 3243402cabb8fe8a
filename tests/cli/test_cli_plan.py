"""`cdp-plan` as a user types it."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
from pathlib import Path

import pytest

from cdp_repro.cli import plan as command
from cdp_repro.cli import train
from cdp_repro.observe.text import format_bytes
from cdp_repro.report import explorer


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_timeline_stages_memory_and_comparison_are_shown_without_data(capsys):
    shown = shown_by(capsys, "workers=3", "batch_size=48", "mode=cdp_v1", "dataset=cifar10")
    assert "worker 2                     F0v0 F1v0 F2v0 B2v0" in shown
    assert "timeline of dp" in shown and "timeline of cdp_v1" in shown
    assert "cut by flops (imbalance" in shown
    assert "equal stages would give (N+1)/2N = 0.667" in shown
    assert "layer3_0 .. head" in shown


@pytest.mark.parametrize(
    ("sizes", "ratio"),
    [("workers=2 stages=4", 0.625), ("workers=3 stages=6", 0.611), ("workers=4 placement=pipeline", 1.0)],
)
def test_of_equal_stages_the_simulation_says_what_the_closed_form_does_not(capsys, sizes, ratio):
    shown = shown_by(capsys, "mode=cdp_v2", "model=mlp", "model.depth=5", "batch_size=48", *sizes.split())
    assert f"equal stages would give {ratio:.3f} in slot order paper" in shown


def test_the_backward_first_order_is_cheaper_and_both_are_shown(capsys):
    rows = shown_by(capsys, "mode=cdp_v2").partition("a device needs")[0].splitlines()
    ratio = {row.split()[1]: float(row.split()[4]) for row in rows if row.startswith("cdp_v2 ")}
    assert ratio["backward_first"] < ratio["paper"] < 1


def test_dp_alone(capsys):
    assert "timeline of dp" in shown_by(capsys, "mode=dp")


def test_files_on_request(capsys, tmp_path):
    shown_by(capsys, "mode=cdp_v2", f"--out={tmp_path / 'plan'}")
    written = {path.name for path in (tmp_path / "plan").iterdir()}
    assert {
        "timeline.svg",
        "timeline.png",
        "memory.svg",
        "memory.png",
        "cdp_v2-actions.csv",
        "dp-trace.json",
    } <= written
    with (tmp_path / "plan" / "cdp_v2-actions.csv").open() as file:
        assert next(csv.DictReader(file)) == {
            "slot": "0",
            "rank": "0",
            "step": "0",
            "worker": "0",
            "action": "F0.m0@v0",
        }
    assert json.loads((tmp_path / "plan" / "cdp_v2-trace.json").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "plan" / "timeline.svg").read_text()


def test_the_program_of_a_file_is_planned(capsys, tmp_path):
    """In the file, the second micro-batch begins when the first has freed its memory."""
    file, small = tmp_path / "program.txt", ("model=mlp", "batch_size=16")
    made = shown_by(capsys, *small, "mode=gpipe", "workers=1", "accumulate=2", f"--program={file}")
    text = file.read_text()
    forward, backward = (
        re.search(rf"^  {slot}  {label}.*\n", text, re.MULTILINE)[0] for slot, label in ((1, "F0.m1"), (2, "B0.m0"))
    )
    file.write_text(text.replace(forward + backward, backward.replace("2", "1", 1) + forward.replace("1", "2", 1)))
    shown = shown_by(capsys, *small, f"program={file}")

    def peak(text, name):
        return re.search(rf"^{name} +paper +(\S+)", text, re.MULTILINE)[1]

    assert "timeline of program" in shown
    assert float(peak(shown, "program")) == pytest.approx(float(peak(made, "gpipe")) / 2, rel=0.01)
    for other in ("--systems", f"--html={tmp_path}/x", f"--program={tmp_path}/x"):
        assert command.main([*small, f"program={file}", other]) == 2
        assert "program=FILE is planned as it is, " in capsys.readouterr().err


def test_an_explorer_on_request(capsys, tmp_path):
    page = tmp_path / "plan.html"
    small = ("model=mlp", "workers=2", "batch_size=16")
    shown = shown_by(capsys, *small, "mode=cdp_v2", f"--html={page}")
    assert "timeline of cdp_v2" in shown and f"html: {page}" in shown
    assert [text in page.read_text() for text in ("mlp, N = 2", '"name":"cdp_v2, single_device"', "zero_bubble")] == (
        [True] * 3
    )
    for arguments, said in (
        (["--html="], "--html= names no file: give --html=FILE"),
        ([f"--html={tmp_path}/none/plan.html"], "none, which is no folder: give the name of a file"),
        (["-m", "mode=dp,cdp_v2"], "cdp-plan takes one run at a time; cdp-train sweeps over many"),
        (["--program=x", "mode=dp", "baseline=ddp"], "--program=FILE writes our programs, baseline=ddp runs torch's"),
        (
            ["mode=dp", "baseline=ddp"],
            "baseline=ddp runs torch's own loop, which has no plan: leave it out, or give price",
        ),
        (["--systems", "stages=4"], "--systems gives each system stages of its own: leave stages=4 out"),
        (["--systems", "mode=async", "message_time=2"], "leave message_time=2.0 out"),
        (["--html", "model=mlp"], "--html took model=mlp for the name of a file: give --html=FILE model=mlp"),
        (["--out", "optim.lr=1"], "--out took optim.lr=1 for the name of a folder: give --out=FOLDER optim.lr=1"),
        ([f"--program={tmp_path}"], "is a folder: give the name of a file"),
        ([f"--out={page}"], "is a file: give the name of a folder"),
        (["cluster.flops_per_second=1e9"], "cluster.* describes the machines of a price: add price=true"),
        (["--systems", "cluster.flops_per_second=1e9"], "cluster.* describes the machines of a price: add price=true"),
        (["--html=x", "price=true", "cluster.flops_per_second=1e9"], "price=true how long it takes: leave one out"),
    ):
        assert command.main([*small, *arguments]) == 2
        assert said in capsys.readouterr().err


def test_an_explorer_that_is_too_large_is_refused_before_anything_is_shown_or_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(explorer, "MOST_BYTES", 20_000)
    page = tmp_path / "plan.html"
    assert command.main(["model=mlp", "workers=4", "batch_size=16", f"--html={page}", f"--out={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr()
    assert "makes a page of" in shown.err and not shown.out
    assert not any(tmp_path.iterdir())


def test_a_full_disk_leaves_no_part_of_a_file(capsys, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for arguments in ([], ["--systems"]):
        assert command.main(["model=mlp", "workers=2", "batch_size=16", f"--out={tmp_path}", *arguments]) == 2
        assert "cannot write there: No space left on device" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_page_of_text_is_not_filled_by_micro_batches_of_many_steps(capsys):
    """A step of pipedream has one micro-batch, but one of data parallelism beside it has N, and N rows."""
    sizes = ("model=mlp", "model.depth=23", "workers=24", "stages=24", "placement=pipeline", "batch_size=24")
    shown = shown_by(capsys, *sizes, "mode=pipedream")
    assert "timelines and memory per slot of 24 workers are too large for text" in shown
    assert len(shown.splitlines()) < 60
    few = ("model=mlp", "workers=24", "stages=4", "ranks=4", "placement=pipeline", "batch_size=24", "micro_batches=4")
    assert "timeline of gpipe" in shown_by(capsys, *few, "mode=gpipe")


def test_impossible_settings_are_refused_with_one_that_works(capsys):
    assert command.main(["mode=[[0,1],[1,0]]", "workers=2"]) == 2
    shown = capsys.readouterr().err
    assert "(micro-batch 0, stage 0)" in shown and "Staleness 1 works at this place" in shown


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert command.main([f"--out={tmp_path / 'file' / 'plan'}"]) == 2
    assert "cannot write there" in capsys.readouterr().err


def test_nothing_is_written_unasked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown_by(capsys)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("placement", ["replicated", "zero", "model_parallel", "pipeline"])
def test_a_plan_counts_the_messages_of_a_placement(capsys, placement):
    assert command.main(["dataset=digits", "model=mlp", "workers=2", "batch_size=16", f"placement={placement}"]) == 0
    out = capsys.readouterr().out
    assert f"2 workers x 8, {placement}" in out
    assert not re.search(r"^cdp_v2 .* 0$", out, re.MULTILINE), "messages are counted"


def test_accumulated_micro_batches_follow_each_other_in_the_row_of_their_worker(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that the grid is one block
    out = shown_by(capsys, "model=mlp", "workers=2", "accumulate=2", "batch_size=16", "mode=cdp_v1")
    assert "mini-batch 16 = 2 workers x 2 accumulated x 4, single_device" in out
    grid = out.split("timeline of cdp_v1")[1]
    rows = [line.split()[2:] for line in grid.splitlines() if re.match(r"worker \d", line)]
    one = ["F0v0", "F1v0", "B1v0", "B0v0"]
    assert rows == [4 * one, 4 * one], "two training steps of two micro-batches, all at the initial version"


def test_a_pipeline_of_fewer_ranks_than_stages(capsys):
    sizes = ("workers=6", "stages=4", "ranks=2", "batch_size=48")
    out = shown_by(capsys, "model=mlp", "mode=dp", "placement=pipeline", *sizes)
    assert "6 workers x 8, pipeline" in out
    slots = [int(number) for line in re.findall(r"^slot +(\d.*)$", out, re.MULTILINE) for number in line.split()]
    assert slots == list(range(2 * (6 * 4 + 4))), "each rank computes 24 times a step, and idles in 4 slots"
    assert re.search(r"^dp +paper .* 12$", out, re.MULTILINE), "an activation and a gradient a micro-batch"


def test_accumulation_and_ranks_that_do_not_fit(capsys):
    for arguments, message in (
        (["accumulate=0"], "accumulate=0: must be 1 or more"),
        (["accumulate=3", "batch_size=64"], "workers=4 x accumulate=3: use batch_size=60 or batch_size=72"),
        (["ranks=2"], "ranks=2 is for placement=pipeline"),
        (["mode=dp", "placement=pipeline", "stages=4", "ranks=3"], "use ranks=1, 2, 4"),
    ):
        assert command.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_replicas_have_rows_of_their_own(capsys):
    assert command.main(["dataset=digits", "model=mlp", "workers=2", "replicas=2", "batch_size=16", "mode=cdp_v1"]) == 0
    out = capsys.readouterr().out
    assert "mini-batch 16 = 2 workers x 2 replicas x 4, single_device" in out
    grid = out.split("timeline of cdp_v1")[1]
    assert "version 1; a worker has 2 lanes)\n" in grid
    rows = [line.split() for line in grid.splitlines() if re.match(r"lane \d", line)]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][2:] == rows[1][2:], "replicas of a worker run in the same slots"
    assert len(rows[2]) == len(rows[3])


@pytest.mark.parametrize(
    ("choices", "head", "kept", "messages"),
    [
        (("mode=pipedream", "placement=pipeline"), "mini-batch 64 = 1 micro-batch x 64, pipeline", 4, 6),
        (
            ("mode=ssp", "placement=parameter_server", "speeds=[1,1,1,2]", "slack=2", "batch_size=48"),
            "mini-batch 48 = 4 pushes of 4 workers x 12, parameter_server", 4, 48,
        ),
        (("mode=gpipe", "micro_batches=6", "batch_size=60"), "mini-batch 60 = 6 micro-batches x 10", 1, 0),
        (("mode=matrix", f"mode.staleness={[[9] * 4] * 4}"), "mini-batch 64 = 4 workers x 16", 10, 0),
    ],
)  # fmt: skip
def test_a_plan_knows_what_comes_after_the_steps_that_it_draws(capsys, choices, head, kept, messages):
    shown = shown_by(capsys, "model=mlp", *choices)
    assert head in shown
    cells = next(line for line in shown.splitlines() if re.match(r"(pipedream|ssp|gpipe|matrix) +paper", line)).split()
    assert int(cells[-2]) == kept
    assert int(cells[-1]) == messages
    assert ("a step of dp has 4 such micro-batches, one of pipedream 1" in shown) == ("mode=pipedream" in choices)


def test_a_plan_says_that_a_step_of_dp_has_fewer_micro_batches_than_a_round_of_pushes(capsys):
    sizes = ("model=mlp", "mode=async", "placement=parameter_server", "speeds=[1,1,1,2]", "batch_size=60")
    assert "a step of dp has 4 such micro-batches, one of async 5" in shown_by(capsys, *sizes)


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        (("mode=cdp_v1", "placement=replicated"), "1 (2 in a drain)"),
        (("mode=ampnet", "workers=3"), "1 (3 in a drain)"),
        (("mode=cdp_v2",), "2"),
    ],
)
def test_versions_of_a_drain_are_told_apart_from_those_of_the_training(capsys, tmp_path, tiny, choices, kept):
    """A run counts the former in its parameter bytes, and the latter in its trace."""
    choices = ("batch_size=12", "workers=2", *choices)
    shown = shown_by(capsys, *tiny, *choices).splitlines()
    rows = [re.split(r"  +", line) for line in shown if re.match(r"(cdp|ampnet).* paper", line)]
    (*_, of_versions, _), (_, _, _, their_bytes, *_) = rows
    assert of_versions == kept
    assert train.main([*tiny, *choices, f"run_dir={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["memory/versions_kept"] == int(kept[0])
    assert format_bytes(summary["memory/parameter_bytes_per_device"]) == their_bytes


def test_a_row_of_a_pipeline_is_no_rank_and_the_plan_says_so(capsys):
    said = "; a row follows micro-batches through the ranks)"
    assert said in shown_by(capsys, "model=mlp", "mode=gpipe", "placement=pipeline")
    assert said not in shown_by(capsys, "model=mlp", "mode=cdp_v2", "placement=replicated")
