"""`cdp-report sweep`: what the finished runs of a sweep say, without a line of code of one's own."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
from conftest import TINY

from cdp_repro.cli import report as command
from cdp_repro.config.source import Source
from cdp_repro.observe.metrics import MetricsLog
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.report.groups import Sample
from cdp_repro.report.sweep_figure import sweep_figure
from cdp_repro.report.sweep_results import SweepResults
from cdp_repro.studies.cells import cells_of, write_list

ROOT = Path("sweep")
SETTINGS = [text for text in TINY if not text.startswith("epochs")]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def top1(settings) -> float:
    """A number that tells all runs apart."""
    return 80 + 100 * settings.optim.lr + settings.seed + (0.5 if settings.mode.name == "dp" else 0)


def swept(*overrides: str, unfinished: str = "nothing", fixed=(*SETTINGS, "epochs=2"), **summary) -> None:
    """Leave the directories of a sweep as its runs would have left them."""
    cells = cells_of(ROOT, [*fixed, *overrides], Source())
    write_list(ROOT, cells)
    for cell in cells:
        run = RunDirectory.create(cell.directory, cell.config.to_dict(), ["cdp-train"])
        if unfinished in cell.name:
            continue
        log = MetricsLog(run.metrics_path)
        epochs = cell.config.epochs
        for epoch in range(epochs):
            log.log(5 * epoch, {"train/loss": 9.0})
            ends = {"train/epoch_loss": 1.0, "eval/top1_percent": top1(cell.config) / (epochs - epoch)}
            log.log(5 + 5 * epoch, {"epoch": epoch, **ends})
        log.close()
        run.write_summary({"status": "finished", "eval/top1_percent": top1(cell.config), "version/code": "c"} | summary)


def told(capsys, *arguments: str) -> str:
    assert command.main(["sweep", str(ROOT), *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert command.main(["sweep", str(ROOT), *arguments]) == 2
    assert not list(ROOT.glob("*.csv"))
    return capsys.readouterr().err


def written(name: str) -> list[dict[str, str]]:
    assert (ROOT / f"{name}.png").stat().st_size and "<svg" in (ROOT / f"{name}.svg").read_text()
    with (ROOT / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_seeds_are_averaged_and_all_else_that_differs_has_a_line(capsys):
    swept("mode=dp,cdp_v2", "optim.lr=0.1,0.02", "seed=0,1,4")
    shown = told(capsys, "--x=optim.lr", "--y=eval/top1_percent")
    rows = written("eval-top1_percent_by_optim.lr")
    assert [(row["mode.name"], row["optim.lr"]) for row in rows] == [
        ("dp", "0.02"), ("dp", "0.1"), ("cdp_v2", "0.02"), ("cdp_v2", "0.1"),
    ]  # fmt: skip
    assert {row["runs"] for row in rows} == {"3"}
    values = [82.5 + seed for seed in (0, 1, 4)]
    assert float(rows[0]["mean of eval/top1_percent"]) == pytest.approx(statistics.fmean(values), abs=1e-3)
    assert float(rows[0]["standard deviation"]) == pytest.approx(statistics.stdev(values), abs=1e-2)
    assert all(row["mean of eval/top1_percent"] in shown for row in rows)


def test_a_number_by_the_epoch(capsys):
    swept("mode=dp,cdp_v2", "seed=0,1")
    told(capsys, "--x=epoch", "--y=eval/top1_percent", "--group=mode")
    rows = written("eval-top1_percent_by_epoch")
    assert [(row["mode.name"], row["epoch"], row["runs"]) for row in rows] == [
        ("dp", "1", "2"), ("dp", "2", "2"), ("cdp_v2", "1", "2"), ("cdp_v2", "2", "2"),
    ]  # fmt: skip
    first, last = (float(row["mean of eval/top1_percent"]) for row in rows[:2])
    assert last == pytest.approx(2 * first, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((1000000, 1000001), ["1000000", "1000001"]),
        ((0.1, 0.1000001), ["0.1", "0.1000001"]),
        ((0.02, 0.1), ["0.02", "0.1"]),
        ((10**18, 10**18 + 1), ["1000000000000000000", "1000000000000000001"]),
    ],
)
def test_labels_of_an_axis_tell_its_values_apart(values, labels):
    points = {value: Sample.from_values([1.0]) for value in values}
    (axis,) = sweep_figure(SweepResults("x", "y", (), {(): points}, {}, ())).axes
    assert [text.get_text() for text in axis.get_xticklabels()] == labels


@pytest.mark.parametrize("names", [("dp", "cdp_v2"), ("cdp_v2 with prediction", "dp"), ("a" * 58,)])
def test_the_legend_fits_into_the_figure(names):
    series = {(name, rate): {1.0: Sample.from_values([2.0])} for name in names for rate in ("0.1", "0.2")}
    figure = sweep_figure(SweepResults("epoch", "y", ("mode", "optim.lr"), series, {}, ()))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


def test_the_figure_says_what_its_means_leave_out():
    points = {1: Sample.from_values([1.0])}
    left_out = {"a": "diverged", "b": "diverged", "c": "damaged (no summary)"}
    for reasons, title in ((left_out, "without 2 diverged, 1 damaged"), ({}, "")):
        (axis,) = sweep_figure(SweepResults("x", "y", (), {(): points}, reasons, ())).axes
        assert axis.get_title(loc="left") == title


def test_an_axis_of_names_and_a_folder_of_ones_own(capsys):
    swept("mode=dp,cdp_v2")
    shown = told(capsys, "--x=mode", "--y=eval/top1_percent", "--out=plots")
    assert "written: plots/eval-top1_percent_by_mode.name.csv" in shown
    assert not list(ROOT.glob("*.svg"))


def test_of_settings_that_go_together_one_is_enough(capsys):
    swept("optim=sgd,adamw", "seed=0,1")
    told(capsys, "--x=epochs", "--y=eval/top1_percent")
    assert {"optim.name", "epochs", "runs"} < written("eval-top1_percent_by_epochs")[0].keys()
    assert "optim.beta1" not in written("eval-top1_percent_by_epochs")[0]


def test_a_setting_that_follows_from_the_axis_has_a_line_of_its_own(capsys):
    swept("mode=dp", "optim.lr=0.02,0.1")
    swept("mode=cdp_v2", "optim.lr=0.2,0.4")
    told(capsys, "--x=optim.lr", "--y=eval/top1_percent")
    rows = written("eval-top1_percent_by_optim.lr")
    assert [(row["mode.name"], row["optim.lr"]) for row in rows] == [
        ("dp", "0.02"), ("dp", "0.1"), ("cdp_v2", "0.2"), ("cdp_v2", "0.4"),
    ]  # fmt: skip


@pytest.mark.parametrize("swept_for", ["optim=sgd,adamw", "dataset=digits,synthetic"])
def test_settings_that_the_choice_on_the_axis_sets_have_no_line(swept_for, capsys):
    axis = swept_for.partition("=")[0]
    swept(swept_for, "mode=dp,cdp_v2", fixed=["model=mlp"])
    told(capsys, f"--x={axis}", "--y=eval/top1_percent")
    rows = written(f"eval-top1_percent_by_{axis}.name")
    assert [row["mode.name"] for row in rows] == ["dp", "dp", "cdp_v2", "cdp_v2"]
    assert [*rows[0]][:3] == ["mode.name", f"{axis}.name", "mean of eval/top1_percent"]


def test_runs_that_are_not_in_it_are_named(capsys):
    swept("mode=dp,cdp_v2", "seed=0,1", unfinished="mode=dp,seed=1")
    shown = told(capsys, "--x=mode", "--y=eval/top1_percent")
    assert "not in it: mode=dp,seed=1 (stopped)" in shown
    assert [row["runs"] for row in written("eval-top1_percent_by_mode.name")] == ["1", "2"]


def test_what_tells_left_out_runs_from_the_others_is_shown(capsys):
    swept("mode=dp,cdp_v2", "seed=0,1", unfinished="mode=dp")
    told(capsys, "--x=epoch", "--y=eval/top1_percent")
    assert [row["mode.name"] for row in written("eval-top1_percent_by_epoch")] == ["cdp_v2", "cdp_v2"]


def test_a_damaged_run_is_named_and_hides_no_other(capsys):
    swept("seed=0,1,2,3")
    RunDirectory.open(ROOT / "seed=0").metrics_path.unlink()
    RunDirectory.open(ROOT / "seed=1").metrics_path.write_text("{\n{}\n")
    lacking = RunDirectory.open(ROOT / "seed=3").metrics_path
    lacking.write_text("".join(line for line in lacking.open() if '"epoch": 0' not in line))
    shown = told(capsys, "--x=mode", "--y=eval/top1_percent")
    assert "seed=0 (damaged (" in shown and "seed=1 (damaged (" in shown
    assert "seed=3 (damaged (" in shown and "lacks the ends of epochs" in shown
    assert [row["runs"] for row in written("eval-top1_percent_by_mode.name")] == ["1"]


@pytest.mark.parametrize("x", ["mode", "epoch"])
def test_a_seed_that_ran_twice_counts_once(x, capsys):
    swept()
    swept("seed=0,1")
    shown = told(capsys, f"--x={x}", "--y=eval/top1_percent")
    assert "not in it: seed=0 (the same run as single)" in shown
    rows = written("eval-top1_percent_by_" + {"mode": "mode.name"}.get(x, x))
    assert {row["runs"] for row in rows} == {"2"}
    values = [top1(cell.config) for cell in cells_of(ROOT, [*SETTINGS, "epochs=2", "seed=0,1"], Source())]
    assert float(rows[-1]["mean of eval/top1_percent"]) == pytest.approx(statistics.fmean(values), abs=1e-3)


def test_one_seed_with_two_numbers_is_refused(capsys):
    swept()
    swept("seed=0,1", **{"eval/top1_percent": 12.5})
    said = refused(capsys, "--x=mode", "--y=eval/top1_percent")
    assert "single and seed=0 are the same run, with seed=0, but differ in eval/top1_percent (" in said
    assert " and 12.5): move one of the two folders out of the sweep's" in said


def test_runs_on_other_data_are_not_averaged(capsys):
    digits = ["dataset=digits", "model=mlp", "epochs=2"]
    swept("seed=0,1", fixed=digits, **{"dataset/fingerprint": "f", "dataset/description": "made up"})
    swept("seed=2", fixed=digits, **{"dataset/fingerprint": "g", "dataset/description": "drawn anew"})
    said = refused(capsys, "--x=mode", "--y=eval/top1_percent")
    assert "seed=0 (made up) and single (drawn anew) would be averaged, but their data differ: move one" in said


def test_images_that_are_drawn_from_the_seed_are_averaged_over_seeds(capsys):
    for seed in (0, 1):
        swept(f"seed={seed},{seed + 5}", **{"dataset/fingerprint": f"of {seed}"})
    told(capsys, "--x=mode", "--y=eval/top1_percent")
    assert [row["runs"] for row in written("eval-top1_percent_by_mode.name")] == ["4"]


def test_settings_that_change_no_number_split_nothing_until_they_are_named(capsys):
    swept("seed=0", "checkpoint_every_steps=5")
    swept("seed=1,2", "checkpoint_every_steps=7")
    for arguments in (["--x=mode"], ["--x=mode", "--group="]):
        told(capsys, *arguments, "--y=eval/top1_percent")
        assert [row["runs"] for row in written("eval-top1_percent_by_mode.name")] == ["3"]
    told(capsys, "--x=mode", "--y=eval/top1_percent", "--group=checkpoint_every_steps")
    assert [row["runs"] for row in written("eval-top1_percent_by_mode.name")] == ["1", "2"]
    told(capsys, "--x=checkpoint_every_steps", "--y=eval/top1_percent")
    assert [row["runs"] for row in written("eval-top1_percent_by_checkpoint_every_steps")] == ["1", "2"]


def test_a_run_counts_where_it_has_ended_not_where_it_began(capsys):
    swept("seed=0,1")
    run = RunDirectory.open(ROOT / "seed=1")
    run.write_summary(run.summary() | {"config": run.config() | {"placement": {"name": "pipeline"}}})
    said = refused(capsys, "--x=mode", "--y=eval/top1_percent", "--group=")
    assert "seed=0 and seed=1 would be averaged, but differ in placement.name" in said
    told(capsys, "--x=placement", "--y=eval/top1_percent")
    rows = written("eval-top1_percent_by_placement.name")
    assert [(row["placement.name"], row["runs"]) for row in rows] == [("single_device", "1"), ("pipeline", "1")]


def test_such_a_setting_is_offered_where_one_seed_has_two_numbers(capsys):
    for steps in (5, 7):
        swept(f"checkpoint_every_steps={steps},{steps + 1}", **{"time/step_seconds_median": 0.1 * steps})
    said = refused(capsys, "--x=mode", "--y=time/step_seconds_median")
    assert "out of the sweep's, or give --group=checkpoint_every_steps" in said


@pytest.mark.parametrize("contents", [("f", "f"), ("f", "g")])
def test_where_the_data_lie_has_a_line_if_other_data_lie_there(contents, capsys):
    for seed, (root, fingerprint) in enumerate(zip("ab", contents, strict=True)):
        Path(root).mkdir()
        text = ["dataset=text", "model=gpt", "optim=adamw", "batch_size=4", "dataset.root=" + root]
        swept(f"seed={seed},{seed + 5}", fixed=text, **{"dataset/fingerprint": fingerprint})
    told(capsys, "--x=mode", "--y=eval/top1_percent")
    runs = [row["runs"] for row in written("eval-top1_percent_by_mode.name")]
    assert runs == (["4"] if contents == ("f", "f") else ["2", "2"])


def test_runs_without_the_number_are_named(capsys):
    swept("seed=0,1")
    run = RunDirectory.open(ROOT / "seed=0")
    run.write_summary(run.summary() | {"memory/peak_bytes": 7, "version/code": "other"})
    shown = told(capsys, "--x=mode", "--y=memory/peak_bytes")
    assert "not in it: seed=1 (has no memory/peak_bytes)" in shown
    assert "2 versions of the code" in told(capsys, "--x=mode", "--y=eval/top1_percent")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--x=optm.lr", "--y=eval/top1_percent"], "--x=optm.lr: no such setting; runs differ in epoch, "),
        (["--x=optim.lr", "--y=top1_percent"], "; did you mean 'eval/top1_percent'?"),
        (["--x=epoch", "--y=train/los"], "has no such number; it has step, train/epoch_loss, "),
        (["--x=seed", "--y=eval/top1_percent", "--group=moed"], "runs differ in mode.name, seed; did you mean 'mode'?"),
        (["--y=eval/top1_percent"], "--x= names no setting: in this sweep you can choose epoch, mode.name, seed"),
        (["--x=mode"], "--y= names no number: the summary of a run has eval/top1_percent"),
        (["--x=seed", "--y=eval/top1_percent", "--group="], "differ in mode.name: give --group=mode.name"),
        (["--x=seed", "--y=eval/top1_percent", "--gruop=mode"], "cdp-report sweep knows no --gruop="),
        (["another", "--x=seed", "--y=eval/top1_percent"], "takes one directory of a sweep, not sweep another"),
    ],
)
def test_mistakes_are_told_with_what_would_work(arguments, said, capsys):
    swept("mode=dp,cdp_v2", "seed=0,1")
    assert said in refused(capsys, *arguments)


def test_all_mistakes_are_told_at_once(capsys):
    swept("mode=dp,cdp_v2", "seed=0,1")
    said = refused(capsys, "--x=optm.lr", "--y=top1_percent", "--group=moed,seed")
    assert [line.partition(":")[0] for line in said.splitlines() if line.startswith("- ")] == [
        "- --x=optm.lr", "- --y=top1_percent", "- --group=moed"
    ]  # fmt: skip


def test_a_folder_of_another_version_or_without_a_finished_run(capsys):
    assert "sweep is no folder of a sweep" in refused(capsys, "--x=mode", "--y=eval/top1_percent")
    swept("seed=0,1", unfinished="seed")
    assert "no run of sweep has finished: seed=0 is stopped" in refused(capsys, "--x=mode", "--y=eval/loss")
    noted = json.loads((ROOT / "sweep.json").read_text())
    (ROOT / "sweep.json").write_text(json.dumps(noted | {"version": 2}))
    assert "sweep.json is of version 2, this program reads 1" in refused(capsys, "--x=mode", "--y=eval/loss")


def test_a_folder_that_cannot_be_written(capsys):
    swept("seed=0,1")
    Path("file").write_text("")
    said = refused(capsys, "--x=mode", "--y=eval/top1_percent", "--out=file/plots")
    assert "cannot write to file/plots" in said and "pass another --out=" in said
