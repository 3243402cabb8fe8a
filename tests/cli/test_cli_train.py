"""`cdp-train` as a user types it: exit codes, messages, what is written where."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from training.test_trainer_placements import same_outcome

from cdp_repro.cli import plan as plan_command
from cdp_repro.cli import train as command
from cdp_repro.config.compose import compose_config
from cdp_repro.launch import StalledError
from cdp_repro.observe.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(logging.getLogger("cdp_repro"), "handlers", [])  # one that writes where this test looks


def test_a_run_gets_a_directory_of_its_own_and_a_summary(tiny, capsys):
    for _ in range(2):
        assert command.main([*tiny, "epochs=1"]) == 0
    shown = capsys.readouterr().out
    assert "test top-1" in shown and re.search(r"simulated; ratio 0\.\d{3}", shown)
    assert [path.name for path in Path().iterdir()] == ["runs"]
    assert len(list(Path("runs").iterdir())) == 2


def test_help_teaches(capsys):
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    values = shown.partition("Values (key=value):\n")[2].splitlines()
    assert values and all(" " not in line.strip() or line[29:31] == "  " for line in values)
    for text in ("mode=cdp_v1 dataset=cifar10", "slot_order=paper", "paper/imagenet_resnet50", "resume=",
                 "launcher.jobs=1", "launcher.partition=     "):  # fmt: skip
        assert text in shown


def test_multirun_gives_each_cell_its_own_directory_and_lists_failures(tiny, capfd):
    others = [text for text in tiny if not text.startswith("model.depth")]
    code = command.main(["--multirun", *others, "epochs=1", "mode=dp", "model.depth=1,4", "seed=0,1", "run_dir=sweep"])
    out, err = capfd.readouterr()
    assert code == 1
    assert "2 of 4 runs finished" in out
    assert err.count("exit code 2: model.depth=1") == 2 and "2 blocks cannot be cut into stages=4" in err
    finished = {path.parent.name: json.loads(path.read_text())["mode"] for path in Path("sweep").glob("*/summary.json")}
    assert finished == {"model.depth=4,seed=0": "dp", "model.depth=4,seed=1": "dp"}


def test_a_mistake_in_one_cell_stops_the_sweep_before_it_starts(tiny, capsys):
    assert command.main(["--multirun", *tiny, "mode=dp,cdp_v3"]) == 2
    assert "unknown mode 'cdp_v3'" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_too_little_memory_is_told_in_a_few_lines(tiny, capsys, monkeypatch):
    def launch(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nstack")

    monkeypatch.setattr(command, "launch", launch)
    assert command.main([*tiny, "run_dir=one"]) == 1
    said = capsys.readouterr().err
    assert "error: not enough memory: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes" in said
    assert "stack" not in said and said.count("\n") == 2


def test_a_mistake_names_its_cells_unless_all_have_it(tiny, capsys):
    said = refused(capsys, "--multirun", *tiny, "epochs=0", "seed=0,1", "batch_size=64,63").splitlines()
    assert sum(line.startswith("- epochs=0: must be 1 or more") for line in said) == 1
    (of_cells,) = [line for line in said if "is not divisible" in line]
    assert of_cells.startswith("- batch_size=63,seed=0 and 1 more: batch_size=63 is not divisible by")


def test_a_mistake_of_one_cell_that_names_it_is_told_once(capsys):
    assert refused(capsys, "-m", "seed=0.25,1", "--dry-run").startswith("error: seed=0.25: Value '0.25' could not")


def test_a_sweep_does_not_mix_with_a_run(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=one"]) == 0
    before = {path.name for path in Path("one").iterdir()}
    assert "run_dir=one is the directory of a run" in refused(capsys, "-m", *tiny, "seed=0,1", "run_dir=one")
    assert {path.name for path in Path("one").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["-m", "launcher.jobs=0", "workers=0", "seed=0,1", "run_dir=a", "hydra.sweep.dir=b"],
            ["run_dir=a hydra.sweep.dir=b name two folders", "launcher.jobs=0: must be", "workers=0: must be"],
        ),
        (
            ["-m", "launcher.jobs=0", "workers=0", "hydra.sweep.dir=${nope}"],
            ["launcher.jobs=0: must be", "hydra.sweep.dir cannot be resolved", "workers=0: must be"],
        ),
        (["-m", "launcher=slrum", "workers"], ["unknown launcher 'slrum'", "'workers' is not of the form key=value"]),
        (
            ["seed=[", "modle=mlp", "workers", "epochs=0"],
            ["'seed=[' is not of the form", "'workers' is not of", "unknown key 'modle'", "epochs=0: must be"],
        ),
        (
            ["-m", "mode=glob(zzz*)", "seed=interval(0,1)"],
            ["mode=glob(zzz*) stands for no value: choose accumulation, ", "seed=interval(0,1) has no end"],
        ),
        (
            ["mode=cdp_v1", "placement=pipeline", "workers=8", "batch_size=64", "ranks=3", "jitter=1"],
            ["jitter=1 is for mode=", "ranks=3 does not divide stages=8: use ranks=8"],
        ),
        (
            ["model=two_towers", "mode=interleaved", "placement=zero", "stages=1", "slack=1"],
            ["stages=1 is not a multiple of 3", "slack=1 is for", "mode=interleaved is not for placement=zero"],
        ),
        (["workers=0", "run_dir=a", "hydra.run.dir=b"], ["name two folders", "workers=0: must be"]),
        (
            ["resume=", "seed=1", "restart=maybe"],
            ["resume= names no run directory", "drop seed=1", "restart=maybe: use restart=true"],
        ),
    ],
)
def test_all_mistakes_of_a_command_line_are_told_at_once(arguments, said, capsys):
    problems = [line for line in refused(capsys, *arguments).splitlines() if line.startswith("- ")]
    assert len(problems) == len(said) and all(text in problem for text, problem in zip(said, problems, strict=True))


def test_a_sweep_can_be_repeated_and_runs_only_what_is_missing(tiny, capfd, cells_here):
    sweep = ["--multirun", *tiny, "epochs=1", "seed=0,1", "run_dir=sweep"]
    assert command.main(sweep) == 0
    (Path("sweep") / "seed=1" / "summary.json").unlink()
    config = Path("sweep") / "seed=1" / "config.yaml"
    config.write_text(config.read_text().replace("collectives: false\n", ""))  # as an older version wrote it
    first = (Path("sweep") / "seed=0" / "metrics.jsonl").stat().st_mtime_ns
    started = len(cells_here)
    assert command.main(sweep) == 0
    told = capfd.readouterr()
    assert "2 of 2 runs finished" in told.out and "1 of 2 runs have finished already" in told.err
    assert len(cells_here) == started + 1, "the process of a finished run would take seconds"
    assert (Path("sweep") / "seed=0" / "metrics.jsonl").stat().st_mtime_ns == first
    assert (Path("sweep") / "seed=1" / "summary.json").exists()
    assert command.main([*sweep, "optim.lr=0.01"]) == 2
    assert "holds a run with another configuration" in capfd.readouterr().err


def test_a_signal_to_a_sweep_reaches_the_cell_which_saves_and_ends(tiny):
    arguments = ["--multirun", *tiny, "epochs=2000", "seed=0,1", "run_dir=sweep"]
    process = subprocess.Popen([sys.executable, "-m", "cdp_repro.cli.train", *arguments], stderr=subprocess.PIPE)
    metrics = Path("sweep/seed=0/metrics.jsonl")
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads(Path("sweep/seed=0/summary.json").read_text())["status"] == "interrupted"
    assert not Path("sweep/seed=1").exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run, expect exit code 2 and a message of one screen, with nothing written here; return the message."""
    before = sorted(Path().rglob("*"))
    assert command.main(list(arguments)) == 2
    shown = capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    assert "Traceback" not in shown and shown.count("\n") < 24
    return shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_cuda_without_a_gpu(capsys):
    assert "use device=cpu" in refused(capsys, "device=cuda")


def test_more_stages_than_blocks(capsys):
    assert "5 blocks cannot be cut into stages=8" in refused(capsys, "stages=8")


def test_a_mini_batch_that_the_workers_do_not_divide(capsys):
    assert "use batch_size=28 or batch_size=32" in refused(capsys, "batch_size=30")


def test_a_mini_batch_larger_than_the_data(capsys):
    assert "use at most batch_size=1440" in refused(capsys, "batch_size=4000")


def test_missing_data(capsys):
    shown = refused(capsys, "dataset=cifar10")
    assert "dataset.root=" in shown and "data/train/<class>" in shown


def test_a_damaged_image(capsys, tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
    broken = tmp_path / "images" / "train" / "dog" / "2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    overrides = ("dataset=cifar10", f"dataset.root={tmp_path / 'images'}", "batch_size=4", "dataset.classes=2")
    assert "dog/2.png" in refused(capsys, *overrides)


def test_a_tree_that_was_unpacked_by_half(capsys, tmp_path):
    for split in ("train", "test"):
        for name, images in (("cat", 3), ("dog", 3 if split == "test" else 2)):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                Image.new("RGB", (32, 32)).save(folder / f"{number}.png")
    shown = refused(capsys, "dataset=cifar10", f"dataset.root={tmp_path / 'images'}", "dataset.classes=2")
    assert "dog has 2 images, cat has 3" in shown


def test_data_with_other_classes_than_configured(capsys, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "images" / split / "cat").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "images" / split / "cat" / "0.png")
    shown = refused(capsys, "dataset=cifar10", f"dataset.root={tmp_path / 'images'}", "batch_size=4")
    assert "use dataset.classes=1" in shown


def test_a_run_directory_that_holds_another_run(capsys, tiny):
    assert command.main([*tiny, "epochs=1", "run_dir=mine"]) == 0
    capsys.readouterr()
    shown = refused(capsys, *tiny, "run_dir=mine")
    assert "resume=" in shown and "run_dir=" in shown


def test_resuming_what_is_no_run(capsys):
    assert "not a run directory" in refused(capsys, "resume=nothing")
    assert "drop seed=1" in refused(capsys, "resume=nothing", "seed=1")


def test_resuming_what_has_no_checkpoint(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=mine", "checkpoint_every_steps=100"]) == 0
    Path("mine/summary.json").unlink()
    for path in Path("mine/checkpoints").iterdir():
        shutil.rmtree(path)
    rows = Path("mine/metrics.jsonl").read_text()
    capsys.readouterr()
    assert "mine has no checkpoint to go on from. Add restart=true" in refused(capsys, "resume=mine")
    assert Path("mine/metrics.jsonl").read_text() == rows
    assert "restart=maybe: use restart=true" in refused(capsys, "resume=mine", "restart=maybe")
    assert "restart=true needs resume=RUN_DIRECTORY beside it" in refused(capsys, *tiny, "restart=true")
    assert command.main(["resume=mine", "restart=true"]) == 0
    assert Path("mine/metrics.jsonl").read_text() == rows


def test_a_summary_that_lacks_what_is_shown(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=mine"]) == 0
    capsys.readouterr()
    Path("mine/summary.json").write_text('{"status": "finished"}')
    assert "summary.json says that the run is finished, but lacks 'dataset'" in refused(capsys, "resume=mine")


@pytest.mark.parametrize("name", ["früße", "two words, it's a=b"])
def test_a_path_is_used_as_it_is_typed(tiny, capsys, name):
    assert command.main([*tiny, "epochs=1", f"run_dir={name}"]) == 0
    assert (Path(name) / "summary.json").exists()
    assert command.main([f"resume={name}"]) == 0
    assert "is finished already" in capsys.readouterr().err
    again = refused(capsys, *tiny, f"run_dir={name}")
    assert shlex.quote(f"resume={Path(name).absolute()}") in again


def test_the_own_folder_is_found(tiny, capsys, monkeypatch, tmp_path, cells_here):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command.main(["--multirun", *tiny, "epochs=1", "seed=0", "run_dir=~/a b"]) == 0
    (cell,) = (path for path in (tmp_path / "a b").iterdir() if path.is_dir())
    assert (cell / "summary.json").exists() and not Path("~").exists()
    assert command.main([f"resume=~/a b/{cell.name}"]) == 0


def test_a_run_goes_on_without_its_program_file(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [*tiny, "mode=cdp_v2", "workers=2", "stages=2"]
    assert plan_command.main([*overrides, "--program=program.txt"]) == 0
    assert command.main([*overrides, "program=program.txt", "run_dir=run"]) == 0
    Path("program.txt").unlink()
    for none in ("program=null", "program="):
        shutil.rmtree("run/checkpoints")  # as of a run that was stopped early
        Path("run/summary.json").unlink()
        assert "program.txt cannot be read" in refused(capsys, "resume=run", "restart=true")
        assert command.main(["resume=run", "restart=true", none]) == 0


def test_a_value_beside_resume_that_cannot_be_read(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=mine"]) == 0
    capsys.readouterr()
    assert "wandb=[" in refused(capsys, "resume=mine", "wandb=[")
    said = refused(capsys, "resume=mine", "wandb=[", "ranks=[", "log_every_steps=0")
    assert all(f"- {text}" in said for text in ("'wandb=[': ", "'ranks=[': ", "log_every_steps=0: "))
    said = refused(capsys, "resume=mine", "placement=pipeline", "ranks=3")
    assert "use ranks=" in said and "would fit" not in said, "other sizes are fixed"


def forget_the_end(run: Path, step: int) -> None:
    """Leave what there would be of a run that was killed after a checkpoint."""
    (run / "summary.json").unlink()
    later = [path for path in (run / "checkpoints").iterdir() if path.name > f"step-{step:09d}"]
    assert later and (run / "checkpoints" / f"step-{step:09d}").is_dir()
    for path in later:
        shutil.rmtree(path)


def test_a_run_that_moves_after_its_last_step_keeps_nothing_of_the_trace_before(tiny, capfd):
    assert command.main([*tiny, "mode=dp", "workers=1", "run_dir=run"]) == 0
    traces = [Path("run", name) for name in ("trace.json", "memory.csv", "comms.csv")]
    assert all(path.exists() for path in traces)
    Path("run/summary.json").unlink()
    capfd.readouterr()
    assert command.main(["resume=run", "placement=replicated"]) == 0
    assert "activation peak       not measured: no training step was traced" in capfd.readouterr().out
    assert not any(path.exists() for path in traces), "they are of the other placement"
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["placement"] == "replicated" and "memory/activation_peak_bytes_total" not in summary


def test_accumulated_micro_batches_train_and_resume_bitwise_on_one_device_and_on_ranks(tiny, capfd):
    settings = [*tiny, "precision=fp64", "workers=2", "accumulate=2", "checkpoint_every_steps=3", "keep_checkpoints=9"]
    whole, ranks = Path("whole"), Path("ranks")
    assert command.main([*settings, f"run_dir={whole}"]) == 0
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["workers"], summary["accumulate"], summary["stages"], summary["step"]) == (2, 2, 2, 10)
    assert summary["staleness"] == [[1, 0], [0, 0], [0, 0], [0, 0]], "only the first read of a step cannot be fresh"
    assert summary["ledger/reads"] == 10 * 4 * 2 * 2
    assert command.main([*settings, "placement=replicated", f"run_dir={ranks}"]) == 0
    assert json.loads((ranks / "summary.json").read_text())["ranks"] == 2
    same_outcome(ranks, whole)
    for run, placement in ((ranks, "replicated"), (ranks, "single_device"), (whole, "single_device")):
        shutil.copytree(whole, "kept", dirs_exist_ok=True)
        forget_the_end(run, 6)
        assert command.main([f"resume={run}", f"placement={placement}"]) == 0
        same_outcome(run, Path("kept"))
    assert "drop accumulate=1" in refused_resume(capfd, f"resume={whole}", "accumulate=1")


def refused_resume(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert command.main([*arguments]) == 2
    return capfd.readouterr().err


def test_a_pipeline_of_fewer_ranks_than_stages_goes_on_anywhere(tiny):
    settings = [*tiny, "precision=fp64", "mode=dp", "workers=2", "stages=4", "checkpoint_every_steps=3"]
    settings += ["keep_checkpoints=9"]
    assert command.main([*settings, "run_dir=whole"]) == 0
    assert command.main([*settings, "placement=pipeline", "ranks=2", "run_dir=ranks"]) == 0
    assert json.loads(Path("ranks/summary.json").read_text())["ranks"] == 2
    same_outcome(Path("ranks"), Path("whole"))
    for given in (["placement=single_device"], ["placement=pipeline", "ranks=1"]):
        forget_the_end(Path("ranks"), 6)
        assert command.main(["resume=ranks", *given]) == 0
        assert json.loads(Path("ranks/summary.json").read_text())["ranks"] == 1
        same_outcome(Path("ranks"), Path("whole"))


def test_a_run_by_a_program_file_goes_on_from_another_folder_and_on_another_placement(tiny, monkeypatch):
    settings = [*tiny, "precision=fp64", "mode=cdp_v2", "workers=2", "checkpoint_every_steps=3", "keep_checkpoints=9"]
    by_hand = [text for text in settings if text.startswith(("mode=", "workers="))]
    assert plan_command.main([*by_hand, "stages=2", "placement=pipeline", "--program=file.txt"]) == 0
    settings += ["stages=2"]
    assert command.main([*settings, "run_dir=whole"]) == 0
    assert command.main([*settings, "placement=pipeline", "program=file.txt", "run_dir=run"]) == 0
    same_outcome(Path("run"), Path("whole"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for given in ([], ["placement=single_device"]):
        forget_the_end(Path("../run"), 6)
        assert command.main(["resume=../run", *given]) == 0
        same_outcome(Path("../run"), Path("../whole"))


def test_a_program_that_is_for_another_run_is_refused_before_there_is_a_directory(tiny, capfd):
    assert plan_command.main(["mode=dp", "--program=file.txt"]) == 0
    for given, says in (("file.txt", "mode=dp there, cdp_v2 here"), ("none", "cannot be read")):
        assert says in refused_resume(capfd, *tiny, "mode=cdp_v2", f"program={given}", "run_dir=run")
    assert not Path("run").exists()


def test_data_that_was_moved_is_named_beside_resume(tmp_path, capfd):
    for split in ("train", "test"):
        for name in "ab":
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (32, 32)).save(tmp_path / "data" / split / name / f"{number}.png")
    small = [
        "dataset=cifar10",
        "dataset.classes=2",
        "model=mlp",
        "batch_size=4",
        "epochs=1",
        "checkpoint_every_steps=1",
    ]
    small += ["checkpoint_every_steps=1", "run_dir=run"]
    assert command.main([*small, f"dataset.root={tmp_path / 'data'}"]) == 0
    (tmp_path / "data").rename(tmp_path / "moved here")
    forget_the_end(Path("run"), 1)
    assert "does not exist" in refused_resume(capfd, "resume=run")
    assert command.main(["resume=run", f"dataset.root={tmp_path / 'moved here'}"]) == 0


def test_accumulation_and_ranks_that_do_not_fit(capsys):
    assert "accumulate=0: must be 1 or more" in refused(capsys, "accumulate=0")
    shown = refused(capsys, "workers=2", "accumulate=2", "replicas=2", "batch_size=30")
    assert "not divisible by workers=2 x accumulate=2 x replicas=2: use batch_size=24 or batch_size=32" in shown
    assert "ranks=2 is for placement=pipeline" in refused(capsys, "placement=replicated", "ranks=2")
    assert "use ranks=1, 2, 4" in refused(capsys, "mode=dp", "placement=pipeline", "ranks=3")


@pytest.mark.parametrize("name", ["da #b", "0123", "1e3", "a: b", "[x"])
def test_a_path_beside_resume_is_taken_as_it_is(name):
    """Other values are read as YAML, in which `#` begins a comment."""
    config = compose_config(["dataset=cifar10", "dataset.root=x"])
    run = RunDirectory.create(Path("run"), config.to_dict(), ["cdp-train"])
    assert command._resumed_config(run, ["resume=run", f"dataset.root={name}"]).dataset.root == name


def test_an_unknown_option(capsys):
    assert command.main(["--mutlirun"]) == 2
    assert "unknown option --mutlirun" in capsys.readouterr().err
    assert "unknown option --workers=3: a setting has no dashes, write workers=3" in refused(capsys, "--workers=3")
    assert "unknown option --resume=r: a setting has no dashes, write resume=r" in refused(capsys, "--resume=r")
    assert "unknown option --mode: a setting has no dashes, write mode=..." in refused(capsys, "--mode", "mode=dp")


def test_a_diverging_run_says_so(capsys, tiny):
    assert command.main([*tiny, "optim.lr=1e12", "optim.warmup_epochs=0"]) == 1
    assert "Try a smaller optim.lr" in capsys.readouterr().err


def test_ctrl_c_saves_a_checkpoint_and_exits_with_130(tiny, capsys):
    arguments = [*tiny, "epochs=2000", "run_dir=mine"]
    command_line = [sys.executable, "-m", "cdp_repro.cli.train", *arguments]
    process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)
    metrics = Path("mine/metrics.jsonl")
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "a checkpoint holds them" in err
    assert json.loads(Path("mine/summary.json").read_text())["status"] == "interrupted"
    step = json.loads(Path("mine/summary.json").read_text())["step"]
    assert sorted(Path("mine/checkpoints").iterdir())[-1].name == f"step-{step:09d}"


def test_a_run_that_was_moved_tells_where_it_is(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=here"]) == 0
    Path("here").rename("there")
    capsys.readouterr()
    assert command.main(["resume=there"]) == 0
    assert f"run directory         {Path('there').absolute()}\n" in capsys.readouterr().out


def test_a_wrong_value_in_the_configuration_of_a_run_is_named_with_its_file(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "run_dir=mine"]) == 0
    path = Path("mine/config.yaml").absolute()
    text = path.read_text()
    path.write_text(text.replace("epochs: 1\n", "epochs: banana\n", 1))
    assert f"{path}: epochs=banana: Value 'banana' could not be converted" in refused(capsys, "resume=mine")
    path.write_text("epochs: 1\n")
    assert f"{path} has no placement" in refused(capsys, "resume=mine")


@pytest.mark.parametrize(("rank", "told"), [("0", ["the run had not begun: nothing is written"]), ("1", [])])
def test_only_rank_0_knows_that_nothing_is_written(monkeypatch, capsys, rank, told):
    def fail(*_):
        raise StalledError((1 - int(rank),), "the other rank is gone", "")

    monkeypatch.setattr(command, "launch", fail)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main(["placement=replicated", "workers=2"]) == 1
    assert capsys.readouterr().err.splitlines() == ["error: the other rank is gone", *told]
