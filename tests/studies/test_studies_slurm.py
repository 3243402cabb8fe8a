"""A real SLURM of one node: `srun` starts the ranks of a run, and `sbatch` the runs of a study."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY
from slurm_daemons import NEEDS_SLURM, SECONDS, ThisHost, slurm_on, wait_for_step
from studies.test_studies_sweep import script_of

from cdp_repro.cli import sweep
from cdp_repro.cli import train as train_command
from cdp_repro.config.compose import compose_config
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.studies.missing_runs import run_directory
from cdp_repro.studies.rows import read_rows
from cdp_repro.studies.status import status_text
from cdp_repro.studies.study import Cell, Study
from cdp_repro.training.run import train

SETTINGS = tuple(text for text in TINY if not text.startswith(("wandb", "epochs", "dataset.train_samples")))
CELL = Cell(("mode=cdp_v2", "workers=2", "optim.lr=0.01", "dataset.train_samples=1600", "epochs=10", *SETTINGS))
STUDY = Study("queued", "accuracy", "one cell has no data", (CELL, Cell(("mode=dp", "dataset=cifar10"))))
STEPS = 1000
"""Of CELL: enough to stop it twice, however late a signal comes."""

pytestmark = NEEDS_SLURM


@pytest.fixture(scope="module")
def slurm():
    with slurm_on(ThisHost()) as started:
        yield started


# --- srun ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the metrics of CELL on one device, without SLURM."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(compose_config([*CELL.overrides, "wandb=disabled"]), folder, ["test"])
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sweep.STUDIES, STUDY.name, STUDY)


def srun(tasks: int, *arguments: str) -> subprocess.Popen[str]:
    command = ["srun", f"--ntasks={tasks}", "--job-name=train", sys.executable, "-m", "cdp_repro.cli.train", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def task_of_rank(slurm, rank: int) -> int:
    """Return the process that SLURM has started as this rank."""
    pids = [int(pid) for pid in re.findall(r"^(\d+) .*\n", slurm.ask("scontrol", "listpids"), re.MULTILINE)]
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
    (found,) = (pid for pid in pids if f"SLURM_PROCID={rank}".encode() in variables[pid])
    return found


def test_ranks_of_srun_stop_at_scancel_and_go_on_to_what_one_device_computes(slurm, alone):
    run = Path("run")
    process = srun(2, *CELL.overrides, "placement=pipeline", "wandb=disabled", f"run_dir={run}")
    wait_for_step(run, 20)
    slurm.ask("scancel", "--name=train")
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM and "pipeline on cpu in 2 processes" in said
    assert RunDirectory.open(run).summary()["status"] == "interrupted"
    process = srun(2, f"resume={run}")
    shown, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert "resumed at training step" in said and "measured, over 2 processes" in shown
    assert read_metrics(run / "metrics.jsonl") == alone and alone[-1]["step"] == STEPS


def test_a_killed_rank_ends_the_job_and_slurm_names_it(slurm):
    run = Path("run")
    process = srun(2, *CELL.overrides, "placement=zero", "wandb=disabled", f"run_dir={run}")
    wait_for_step(run, 5)
    os.kill(task_of_rank(slurm, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert "task 1: Killed" in said
    assert "error: the connection to rank 1 is lost: look what ended there first" in said and "go on with:" in said


# --- sbatch --------------------------------------------------------------------------------------------------------


def test_an_array_trains_a_study_through_scancel_and_the_end_of_its_time(slurm, alone):
    assert sweep.main([STUDY.name], ["--slurm=sweep.sh"], script=str(script_of(STUDY))) == 0
    run = run_directory(Path("runs/studies"), STUDY.name, CELL, 0)
    first = slurm.ask("sbatch", "--parsable", "sweep.sh").strip()
    wait_for_step(run, 20)
    slurm.ask("scancel", f"{first}_0")
    slurm.wait_until_done("both jobs end")
    log = Path(f"runs/studies/slurm/{first}_0.log")
    assert "stopped by signal 15: call it again to go on" in log.read_text()
    assert RunDirectory.open(run).summary()["status"] == "interrupted"
    log = Path(f"runs/studies/slurm/{first}_1.log").read_text()
    assert "exit code 2: queued: cdp-train mode=dp dataset=cifar10: " in log and "0 of 1 runs are done" in log

    stopped = len(read_metrics(run / "metrics.jsonl"))
    second = slurm.ask("sbatch", "--parsable", "--array=0", "sweep.sh").strip()
    wait_for_step(run, stopped + 20)
    slurm.ask("scancel", "--batch", "--signal=USR2", f"{second}_0")  # what --signal= of the script asks for
    slurm.wait_until_done("the job, queued again")
    log = Path(f"runs/studies/slurm/{second}_0.log").read_text()
    assert log.count("cdp-train resume=") == 2 and "1 of 1 runs are done" in log
    assert read_metrics(run / "metrics.jsonl") == alone
    (row,) = read_rows(Path("results/rows") / STUDY.name)
    assert (row.cell, row.summary["step"]) == (CELL.hash, STEPS)
    assert "2 runs: 1 done, 1 failed" in status_text([STUDY], Path("runs/studies"), Path("results"))


def test_a_sweep_is_queued_preempted_and_finished_and_a_failure_is_told(slurm, alone, capsys):
    words = ["-m", *CELL.overrides, "placement=pipeline", "stages=2,8", "wandb=disabled", "run_dir=sweep"]
    assert train_command.main([*words, "launcher=slurm", "launcher.cpus_per_task=2"]) == 0
    (array,) = re.findall(r"queued 2 runs as array (\d+): cdp-train --status=sweep", capsys.readouterr().out)
    run = Path("sweep/stages=2")
    wait_for_step(run, 20)
    slurm.ask("scontrol", "requeue", f"{array}_0")  # what a pre-emption does: SIGTERM, and a place in the queue
    slurm.wait_until_done("both jobs, one of them queued again")
    assert "resumed at training step" in RunDirectory(run).log_path(0).read_text()
    assert read_metrics(run / "metrics.jsonl") == alone
    assert train_command.main(["--status=sweep"]) == 0
    shown = capsys.readouterr().out
    assert "cannot be cut into stages=8" in shown
    assert "2 runs: 1 finished, 1 failed" in shown
