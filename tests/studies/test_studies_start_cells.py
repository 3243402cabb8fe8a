"""Sweeps of `cdp-train`: several runs at once, an array for SLURM, and what is shown of them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from PIL import Image

from cdp_repro.cli import plan as plan_command
from cdp_repro.cli import train as command
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.source import OURS
from cdp_repro.observe.locked_folder import alone_in
from cdp_repro.observe.run_directory import COMMAND, RunDirectory
from cdp_repro.predict.cutting import model_of
from cdp_repro.studies import start_cells
from cdp_repro.studies.at_once import Ended
from cdp_repro.studies.cells import Cell, cells_of, read_list, write_list
from cdp_repro.studies.sweep_status import sweep_text
from cdp_repro.training import weights

SLURM = ("launcher=slurm", "launcher.partition=gpu")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder of commands named as SLURM's: `sbatch` keeps its arguments, `squeue` says what a test writes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "sbatch": f'echo "$@" > {folder}/asked; echo "$PYTHON" >> {folder}/asked; echo "42;cluster"',
        "squeue": f"cat {folder}/queue 2>/dev/null",
        "scontrol": f'echo "$@" > {folder}/requeued',
        "srun": 'shift 2; exec "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def sweep(*arguments: str) -> int:
    return command.main(["-m", *arguments, "hydra.sweep.dir=sweep"])


def job(script: Path, index: int) -> subprocess.Popen[str]:
    """Start one job of an array, as SLURM would."""
    variables = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_JOB_ID": "42", "SLURM_SUBMIT_DIR": str(Path.cwd())}
    environment = {**os.environ, **variables, "PYTHON": sys.executable}
    return subprocess.Popen(["bash", script], env=environment, stderr=subprocess.PIPE, text=True)


def test_a_sweep_over_a_program_file_can_be_repeated(tiny, capfd, cells_here):
    sizes = ["mode=dp", "workers=2", "stages=2"]
    assert plan_command.main([*sizes, "--program=file.txt"]) == 0
    words = [*tiny, *sizes, "epochs=1"]
    assert sweep(*words, "program=file.txt") == 0
    Path("sweep/single/summary.json").unlink()
    capfd.readouterr()
    assert sweep(*words, "program=file.txt", "--dry-run") == 0
    assert capfd.readouterr().out.startswith("cdp-train resume=sweep/single")
    Path("file.txt").rename("other.txt")
    assert sweep(*words, "program=other.txt", "--dry-run") == 2
    assert "sweep/single holds a run with another configuration" in capfd.readouterr().err


def test_a_repeated_sweep_goes_on_with_other_settings_that_change_no_result(tiny, capsys):
    words = [text for text in tiny if not text.startswith(("wandb", "log_every"))]
    words += ["mode=dp", "placement=replicated"]
    for cell in cells_of(Path("sweep"), [*words, "seed=0,1"], OURS):
        RunDirectory.create(cell.directory, cell.config.to_dict(), ["cdp-train"])
    others = ["wandb=disabled", "checkpoint_every_steps=2"]
    assert sweep(*words, "seed=0,1", *others, "--dry-run") == 0
    assert capsys.readouterr().out.count(f" restart=true {' '.join(others)}\n") == 2
    assert sweep(*words, "seed=0,1", *others, "--dry-run", *SLURM) == 0
    script = capsys.readouterr().out
    assert script.count(f"changeable=({' '.join(others)}) ;;") == 2
    for setting in ("collectives=true", "keep_checkpoints=5"):  # the last bits; what a run cannot go on with
        assert sweep(*words, "seed=0,1", setting, "--dry-run") == 2
        assert "holds a run with another configuration" in capsys.readouterr().err


def test_a_sweep_that_is_stopped_says_how_to_go_on(tiny, monkeypatch, capsys):
    monkeypatch.setattr(command, "train_here", lambda cells, jobs: Ended((), signal.SIGINT))
    assert sweep(*tiny, "seed=0,1") == 128 + signal.SIGINT
    assert "stopped: 0 of 2 runs have finished, in sweep; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--dry-run"], ["launcher=slurm"]])
@pytest.mark.parametrize(
    ("counted", "variables"),
    [
        ("WORLD_SIZE", {"RANK": "1", "WORLD_SIZE": "2"}),
        ("SLURM_NTASKS", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "here"}),
    ],
)
def test_several_processes_start_no_sweep(counted, variables, how, tiny, monkeypatch, slurm, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sweep(*tiny, "epochs=1", *how) == 2
    said = capsys.readouterr().err
    assert f"2 processes have been started ({counted}), and each would train the whole sweep: start one, with" in said
    assert not list(Path().iterdir()) and not (slurm / "asked").exists()


def test_a_single_process_of_a_starter_starts_a_sweep(tiny, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert sweep(*tiny, "seed=0,1", "--dry-run") == 0


@pytest.mark.parametrize(
    ("folder", "beside"),
    [
        (["run_dir=my sweep"], ""),
        ([], " with run_dir=runs/sweep-TIME"),
        (["hydra.sweep.dir='a b-${now:%f}'"], " with 'run_dir=a b-TIME'"),
    ],
)
def test_a_sweep_that_is_stopped_names_its_folder_unless_the_same_command_does(
    folder, beside, tiny, monkeypatch, capsys
):
    monkeypatch.setattr(command, "train_here", lambda cells, jobs: Ended((), signal.SIGINT))
    assert command.main(["-m", *tiny, "seed=0,1", *folder]) == 128 + signal.SIGINT
    said = re.sub(r"-[\d-]{6,}", "-TIME", capsys.readouterr().err)
    assert f"; the same command{beside} goes on\n" in said


def child_of(process: int) -> int:
    """Return the process that another one has started."""
    found = [pid for path in Path(f"/proc/{process}/task").glob("*/children") for pid in path.read_text().split()]
    return int(found[0])


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_that_was_killed_waits_for_the_run_that_still_goes_on(tiny, jobs, caplog):
    caplog.set_level("INFO", "cdp_repro")
    words = ["-m", *tiny, "dataset.train_samples=1600", "epochs=4", "seed=0", f"launcher.jobs={jobs}", "run_dir=sweep"]
    run = RunDirectory(Path("sweep/single"))
    first = subprocess.Popen([sys.executable, "-m", "cdp_repro.cli.train", *words])
    deadline = time.monotonic() + 120
    while not (run.metrics_path.exists() and run.metrics_path.stat().st_size):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child = child_of(first.pid)
    try:
        os.kill(child, signal.SIGSTOP)  # it must not finish before the second sweep looks
        first.kill()
        first.wait()
        threading.Timer(2, os.kill, (child, signal.SIGCONT)).start()
        assert command.main(words) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert "another process trains in sweep/single: waiting for it" in caplog.text
    assert len((run.path / COMMAND).read_text().splitlines()) == 1, "the second sweep has trained nothing"
    assert run.summary()["status"] == "finished"


def test_runs_at_once_have_a_log_each_and_failures_are_told(tiny, capfd):
    words = [text for text in tiny if not text.startswith("model.depth")]
    code = sweep(*words, "epochs=1", "mode=dp", "model.depth=1,4", "seed=0,1", "launcher.jobs=2")
    out, err = capfd.readouterr()
    assert code == 1 and "2 of 4 runs finished, in sweep" in out
    assert "exit code 2: model.depth=1,seed=0 (see sweep/model.depth=1,seed=0.log)" in err
    assert command.main(["--status=sweep"]) == 0
    shown = capfd.readouterr().out
    assert "4 runs: 2 failed, 2 finished" in shown
    assert shown.count("2 blocks cannot be cut into stages=4") == 2, "the last line of a failure"
    assert "5 of 5" in shown


def test_a_failure_of_one_after_another_is_told_too(tiny, capfd, cells_here):
    assert sweep(*tiny, "seed=0,1", "optim.lr=1e30") == 1
    capfd.readouterr()
    assert command.main(["--status=sweep"]) == 0
    assert capfd.readouterr().out.count("exit code 1; error: the loss of training step") == 2


def test_a_run_that_starts_again_forgets_the_words_of_its_last_failure(tiny, monkeypatch, cells_here):
    assert sweep(*tiny, "optim.lr=1e30", "seed=0,1") == 1
    log = Path("sweep/seed=0.log")
    assert "the loss of training step" in log.read_text()
    again, seen = start_cells.train_in_process, []

    def look(*arguments, **named):
        seen.append(log.read_text())
        return again(*arguments, **named)

    monkeypatch.setattr(start_cells, "train_in_process", look)
    assert sweep(*tiny, "optim.lr=1e30", "seed=0,1") == 1
    assert seen[0] == ""


def test_a_run_that_fails_before_it_has_a_folder_is_told_with_its_log(capfd, cells_here):
    words = ("dataset=text", "dataset.root=none.txt", "model=gpt", "model.context=16", "wandb=disabled", "seed=0,1")
    assert sweep(*words) == 1
    told = capfd.readouterr().err
    assert "exit code 2: seed=0 (see sweep/seed=0.log)" in told and Path("sweep/seed=0.log").exists()


def test_sweeps_that_start_together_in_a_folder_are_both_listed(tiny):
    cells = [Cell(Path("sweep", name), (), compose_config(tiny)) for name in ("a", "b")]
    with alone_in(Path("sweep")):
        other = threading.Thread(target=write_list, args=(Path("sweep"), cells[:1]))
        other.start()
        other.join(0.2)
        assert other.is_alive() and not Path("sweep/sweep.json").exists()
    other.join(10)
    write_list(Path("sweep"), cells[1:])
    assert [*read_list(Path("sweep")).epochs] == ["a", "b"]


@pytest.mark.parametrize("launcher", [[], ["launcher.jobs=2"], ["launcher=slurm"]])
def test_weights_of_another_model_are_told_once_and_nothing_starts(tiny, capfd, slurm, launcher, monkeypatch):
    torch.save({"weight": torch.zeros(2)}, "other.pt")
    check_weights, checked = weights.check_weights, []
    monkeypatch.setattr(weights, "check_weights", lambda config: checked.append(config) or check_weights(config))
    assert sweep(*tiny, "seed=0,1", "model.depth=4,5", "model.weights=other.pt", *launcher) == 2
    said = capfd.readouterr().err
    assert said.count("is of another model than model=mlp") == 2, "once for each depth, not for each seed"
    assert len(checked) == 2, "building a model takes seconds"
    assert not Path("sweep").exists() and not (slurm / "asked").exists()


def test_a_dry_run_shows_what_would_start_and_writes_nothing(tiny, capsys):
    assert sweep(*tiny, "seed=0,1", "--dry-run") == 0
    assert capsys.readouterr().out.count("cdp-train dataset=synthetic") == 2
    assert sweep(*tiny, "seed=0,1", "--dry-run", *SLURM, "launcher.at_once=1", "launcher.gpus_per_node=1") == 0
    script = capsys.readouterr().out
    for text in ("--array=0-1%1\n", "--partition=gpu\n", "--gpus-per-node=1\n", "--requeue\n", "run=sweep/seed=1;"):
        assert text in script
    assert list(Path().iterdir()) == []
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_an_array_is_queued_and_noted(tiny, capsys, slurm):
    assert sweep(*tiny, "seed=0,1", *SLURM) == 0
    assert "queued 2 runs as array 42: cdp-train --status=sweep shows them" in capsys.readouterr().out
    assert (slurm / "asked").read_text().split() == ["--parsable", "sweep/sweep.sh", sys.executable]
    assert read_list(Path("sweep")).arrays == {"42": ["seed=0", "seed=1"]}
    (slurm / "queue").write_text("42_0 RUNNING\n42_1 PENDING\n")
    shown = sweep_text(Path("sweep"))
    assert "2 runs: 1 running, 1 queued" in shown
    (slurm / "queue").write_text("")
    Path("sweep/slurm/42_0.log").write_text("no module named torch\n")
    Path("sweep/slurm/42_1.log").touch()
    shown = sweep_text(Path("sweep"))
    assert "2 runs: 1 failed, 1 missing" in shown and shown.count("no module named torch") == 1


def test_a_job_begins_its_run_goes_on_with_it_and_queues_again_before_the_time_is_up(tiny, slurm):
    words = [text for text in tiny if not text.startswith("epochs")]
    assert sweep(*words, "epochs=2000", "seed=0,1", *SLURM) == 0
    script, run = Path("sweep/sweep.sh"), RunDirectory(Path("sweep/seed=1"))
    for resumed in (False, True):
        process = job(script, 1)
        before = run.metrics_path.stat().st_size if resumed else 0
        deadline = time.monotonic() + 120
        while not (run.metrics_path.exists() and run.metrics_path.stat().st_size > before):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR2)
        process.communicate(timeout=120)
        assert process.returncode == 143
        assert (slurm / "requeued").read_text() == "requeue 42_1\n"
        (slurm / "requeued").unlink()
        assert run.summary()["status"] == "interrupted"
        shown = sweep_text(Path("sweep"))
        assert "interrupted" in shown and "missing" in shown
    assert "resumed at training step" in run.log_path(0).read_text()
    assert not Path("sweep/seed=0").exists()


def test_a_job_whose_folder_looks_like_a_pattern_goes_on(tiny, slurm, capsys):
    words = [*tiny, "mode=[[1,1],[1,1]],[[1,1],[1,0]]", "workers=2", "stages=2", "checkpoint_every_steps=3"]
    script, run = Path("my sweep/sweep.sh"), Path("my sweep/mode=[[1,1],[1,0]]")
    for expected, changed in (
        ("", []),
        ("is finished already", None),  # the same array again
        ("resumed at training step 9", ["timeout_seconds=77"]),
    ):
        assert changed is None or command.main(["-m", *words, *changed, *SLURM, "run_dir=my sweep"]) == 0
        said = job(script, 1).communicate(timeout=120)[1]
        assert expected in said and (run / "summary.json").exists(), said
        if expected:
            (run / "summary.json").unlink()
            shutil.rmtree(run / "checkpoints" / "step-000000010")
    assert "#SBATCH --job-name='cdp-my sweep'\n" in script.read_text()
    assert (run / "command.txt").read_text().endswith("timeout_seconds=77\n"), "what the array was queued again with"


def test_a_sweep_queues_only_the_runs_that_have_not_finished(tiny, slurm, capsys):
    def finish(*seeds):
        for cell in cells_of(Path("sweep"), [*tiny, "seed=0,1,2"], OURS):
            if cell.name in {f"seed={seed}" for seed in seeds}:
                run = RunDirectory.create(cell.directory, cell.config.to_dict(), ["cdp-train"])
                run.write_summary({"status": "finished"})

    words = [*tiny, "seed=0,1,2", *SLURM]
    assert sweep(*words) == 0
    finish(1)
    capsys.readouterr()
    assert sweep(*words) == 0
    told = capsys.readouterr()
    assert "1 of 3 runs have finished already" in told.err and "queued 2 runs as array" in told.out
    script = Path("sweep/sweep.sh").read_text()
    assert "run=sweep/seed=0;" in script and "1) run=sweep/seed=2;" in script and "seed=1" not in script
    assert [*read_list(Path("sweep")).arrays.values()][-1] == ["seed=0", "seed=2"]
    assert [*read_list(Path("sweep")).epochs] == ["seed=0", "seed=1", "seed=2"]
    finish(0, 2)
    assert sweep(*words) == 0
    assert "3 of 3 runs finished, in sweep\n" in capsys.readouterr().out


def test_what_sbatch_takes_stands_as_it_was_typed(tiny, capsys):
    assert sweep(*tiny, "seed=0,1", "--dry-run", *SLURM, "launcher.mem=1e3", "launcher.time=1:30:00") == 0
    script = capsys.readouterr().out
    assert "--mem=1e3\n" in script and "--time=1:30:00\n" in script
    assert sweep(*tiny, "seed=0,1", "--dry-run", *SLURM, "launcher.mem=") == 2
    assert "launcher.mem= is empty: give what sbatch takes, or leave it out" in capsys.readouterr().err


def test_on_several_nodes_srun_starts_the_ranks(tiny, capsys):
    words = [*tiny, "workers=2", "placement=replicated", "seed=0,1", "--dry-run", *SLURM, "launcher.nodes=2"]
    assert sweep(*words) == 0
    script = capsys.readouterr().out
    assert "--nodes=2\n" in script and "--ntasks-per-node=1\n" in script
    assert "0) ranks=2; run=sweep/seed=0;" in script
    assert (
        'srun --ntasks=$ranks --cpus-per-task=4 "${PYTHON:-python}" -m cdp_repro.cli.train "${arguments[@]}" &'
        in script
    )
    of_the_job = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'  # the last job's own number is that of the array
    assert f"scancel --signal=TERM {of_the_job}" in script and "kill -TERM" not in script
    assert sweep(*words, "launcher.nodes=3") == 2
    assert (
        "launcher.nodes=3 cannot share the 2 ranks of seed=0 equally: use launcher.nodes=1" in capsys.readouterr().err
    )


def test_what_slurm_would_read_in_the_name_of_a_folder_stays_as_it_is(tiny, capsys):
    words = ["-m", *tiny, "seed=0,1", "--dry-run", *SLURM]
    assert command.main([*words, "hydra.sweep.dir=a@command@/100%a"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --output=a@command@/100%%a/slurm/%A_%a.log\n" in script
    assert "\n# Status: cdp-train --status=a@command@/100%a\n" in script
    assert command.main([*words, r"hydra.sweep.dir=back\slash"]) == 2
    assert (
        r"SLURM cannot write into back\slash/slurm, whose name has a \: use another run_dir=" in capsys.readouterr().err
    )


def test_what_cannot_be_queued_writes_nothing(tiny, capsys, slurm, monkeypatch):
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    assert sweep(*tiny, "seed=0,1", *SLURM) == 2
    assert "sbatch refuses sweep/sweep.sh: invalid partition" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert command.main(["-m", *tiny, "seed=0,1", *SLURM, "run_dir=other"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    assert not Path("other").exists()


def test_folders_that_are_none_of_a_sweep_of_this_version(capsys, tiny):
    assert command.main(["--status=nowhere"]) == 2
    assert "nowhere is no folder of a sweep: it does not exist" in capsys.readouterr().err
    Path("sweep").touch()
    assert sweep(*tiny, "seed=0,1", "--dry-run") == 2
    assert "run_dir=sweep is a file: a sweep needs a folder" in capsys.readouterr().err
    Path("sweep").unlink()
    Path("sweep").mkdir()
    assert command.main(["--status=sweep"]) == 2
    assert "sweep is no folder of a sweep: it has no sweep.json" in capsys.readouterr().err
    path = Path("sweep/sweep.json")
    for content, said in (
        ('{"format": "cdp-repro sweep", "version": 2}', "is of version 2, this program reads 1"),
        ('{"format": "other"}', "is not of a sweep"),
        ("{", "is damaged: .*; delete it and start the sweep again"),
        ('{"format": "cdp-repro sweep", "version": 1}', "is damaged: it has no cells by name in 'epochs'; delete it"),
        (
            '{"format": "cdp-repro sweep", "version": 1, "epochs": {"seed=0": 1}, "arrays": {"7": "seed=0"}}',
            "is damaged: it has no cells by name in 'arrays'; delete it",
        ),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_list(Path("sweep"))
        assert sweep(*tiny, "seed=0,1") == 2, "nothing is started there"
        assert path.read_text() == content and len(list(Path("sweep").iterdir())) == 1
    capsys.readouterr()
    assert command.main(["--status=sweep", "seed=1"]) == 2
    assert "stands alone: drop seed=1" in capsys.readouterr().err
    assert command.main(["--dry-run", "seed=1"]) == 2
    assert "add --multirun" in capsys.readouterr().err


GPT = ("dataset=text", "model=gpt", "model.width=8", "model.heads=2", "model.depth=2", "model.context=16", "workers=2",
       "stages=2", "batch_size=64", "optim.warmup_epochs=0")  # fmt: skip
PICTURES = ("dataset=cifar10", "dataset.classes=2", "model=mlp", "batch_size=2", "workers=2")


def write_text(path: Path, content: str) -> None:
    path.write_text(content * 150)


def write_images(path: Path, content: str) -> None:
    for split, name in itertools.product(("train", "test"), "ab"):
        (path / split / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (len(content), 0, 0)).save(path / split / name / "0.png")


@pytest.mark.parametrize("is_old", [False, True], ids=["", "of an older version"])
@pytest.mark.parametrize(("settings", "write"), [(GPT, write_text), (PICTURES, write_images)], ids=["text", "images"])
def test_a_finished_run_does_not_pass_for_one_on_data_of_the_same_name_in_another_folder(
    settings, write, is_old, monkeypatch, capsys, cells_here
):
    above = Path.cwd()
    words = ["-m", *settings, "dataset.root=data", "epochs=1", "wandb=disabled", f"run_dir={above / 'sweep'}"]
    for name, content in (("first", "one way to say it "), ("copy", "one way to say it "), ("other", "and another. ")):
        (above / name).mkdir()
        write(above / name / "data", content)
    monkeypatch.chdir("first")
    assert command.main(words) == 0
    run = RunDirectory.open(above / "sweep" / "single")
    for path in (run.path / "config.yaml", run.summary_path) if is_old else ():
        path.write_text(path.read_text().replace(str(Path("data").absolute()), "data"))  # as it was typed
    monkeypatch.chdir(above / "copy")
    assert command.main(words) == 0, "they are the same data"
    capsys.readouterr()
    monkeypatch.chdir(above / "other")
    assert command.main(words) == 2
    assert f"{run.path} holds a run with another configuration, on other data (" in capsys.readouterr().err
    assert len((run.path / COMMAND).read_text().splitlines()) == 1, "it was trained once"


def test_a_finished_run_does_not_pass_for_one_from_weights_of_the_same_name_in_another_folder(
    tiny, monkeypatch, capsys, cells_here
):
    above = Path.cwd()
    words = ["-m", *tiny, "model.weights=w.pt", "epochs=1", f"run_dir={above / 'sweep'}"]
    for folder in (above / "other", above / "first"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        torch.save(model_of(compose_config(tiny)).state_dict(), "w.pt")
    assert command.main(words) == 0 and command.main(words) == 0
    monkeypatch.chdir(above / "other")
    assert command.main(words) == 2
    assert "single holds a run with another configuration" in capsys.readouterr().err
    monkeypatch.chdir(above / "first")
    config = above / "sweep" / "single" / "config.yaml"
    config.write_text(config.read_text().replace(str(Path("w.pt").absolute()), "w.pt"))  # as older versions keep it
    assert command.main(words) == 0


def test_a_finished_run_does_not_pass_for_one_on_another_text(capsys, cells_here):
    gpt = (*GPT, "epochs=1", "wandb=disabled")
    for name, words in (("a.txt", "one way to say it "), ("b.txt", "and quite another. ")):
        Path(name).write_text(words * 150)
    assert sweep(*gpt, "dataset.root=a.txt", "seed=0") == 0
    assert sweep(*gpt, f"dataset.root={Path('a.txt').absolute()}", "seed=0") == 0, "it is the same text"
    capsys.readouterr()
    assert sweep(*gpt, "dataset.root=b.txt", "seed=0") == 2
    assert "holds a run with another configuration" in capsys.readouterr().err


def test_paths_that_differ_only_in_what_names_cannot_hold_are_two_cells():
    cells = cells_of(Path("sweep"), ["dataset=cifar10", "model=mlp", "dataset.root=choice(a/b,a-b)", "seed=0,1"], OURS)
    names = sorted(cell.name for cell in cells)
    assert len(set(names)) == 4
    assert names[0] == "dataset.root=a-b,seed=0" and re.fullmatch(names[0] + "-[0-9a-f]{8}", names[1])


def test_a_folder_in_the_place_of_a_log_is_told(tiny):
    cells = cells_of(Path("sweep"), [*tiny, "seed=0,1,2"], OURS)
    write_list(Path("sweep"), cells)
    for cell in cells:
        cell.log.mkdir()
    for cell, status in zip(cells[1:], ("failed", "finished"), strict=True):
        run = RunDirectory.create(cell.directory, cell.config.to_dict(), ["cdp-train"])
        run.write_summary({"status": status})
    told = "is a folder, expected a file: move it away"
    lines = [re.split(" {2,}", line.strip()) for line in sweep_text(Path("sweep")).splitlines()[1:4]]
    assert lines == [
        ["seed=0", "failed", "-", f"sweep/seed=0.log {told}"],
        ["seed=1", "failed", "-", f"sweep/seed=1.log {told}"],
        ["seed=2", "finished", "-"],
    ]


def test_a_run_under_way_shows_its_rate_and_the_time_left(tiny, monkeypatch, cells_here):
    words = [text for text in tiny if not text.startswith("epochs")]
    assert sweep(*words, "epochs=1", "seed=0,1") == 0
    run = RunDirectory(Path("sweep/seed=0"))
    run.summary_path.unlink()
    begun = (run.path / "command.txt").stat().st_mtime
    os.utime(run.metrics_path, (begun + 10, begun + 10))
    noted = json.loads(Path("sweep/sweep.json").read_text())
    Path("sweep/sweep.json").write_text(json.dumps({**noted, "epochs": {"seed=0": 1000, "seed=1": 1}}))
    monkeypatch.setattr("cdp_repro.studies.sweep_status.run_state", lambda *_: "running")
    (line,) = [line for line in sweep_text(Path("sweep")).splitlines() if line.startswith("seed=0")]
    assert line.split() == ["seed=0", "running", "5", "of", "5000", "0.5", "2.8", "h"]
    with run.log_path(0).open("a") as log:
        log.write("INFO resumed at training step 2\n")
    (line,) = [line for line in sweep_text(Path("sweep")).splitlines() if line.startswith("seed=0")]
    assert line.split()[5] == "0.3", "of the steps since it went on"
    monkeypatch.setattr("cdp_repro.studies.sweep_status.run_state", lambda *_: "interrupted")
    run.write_summary({"status": "interrupted", "step": 7})  # after its last row
    assert "seed=0  interrupted  7 of 5000" in sweep_text(Path("sweep"))
    run.summary_path.write_text("{")
    shown = sweep_text(Path("sweep"))
    assert "\nseed=0" in shown and "\nseed=1" in shown, "one damaged summary hides no other run"
