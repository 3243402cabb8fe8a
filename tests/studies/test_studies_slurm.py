"""A real SLURM of one node: `srun` starts the ranks of a run, and `sbatch` the runs of a study.

It needs root and Debian's packages slurm-wlm and munge, or their like. Its daemons have their own ports and folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import TINY
from studies.test_studies_sweep import script_of

from cdp_repro.cli import sweep
from cdp_repro.cli import train as train_command
from cdp_repro.config.compose import compose_config
from cdp_repro.launch.in_rank import die_with_parent
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.studies.missing_runs import run_directory
from cdp_repro.studies.rows import read_rows
from cdp_repro.studies.status import status_text
from cdp_repro.studies.study import Cell, Study
from cdp_repro.training.run import train

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
LACKING = [tool for tool in TOOLS if shutil.which(tool) is None]
IS_ROOT = sys.platform == "linux" and os.geteuid() == 0
SECONDS = 300

SETTINGS = tuple(text for text in TINY if not text.startswith(("wandb", "epochs", "dataset.train_samples")))
CELL = Cell(("mode=cdp_v2", "workers=2", "optim.lr=0.01", "dataset.train_samples=1600", "epochs=4", *SETTINGS))
STUDY = Study("queued", "accuracy", "one cell has no data", (CELL, Cell(("mode=dp", "dataset=cifar10"))))
STEPS = 400
"""Of CELL: enough to stop it twice."""

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"SLURM is not installed: no {', '.join(LACKING)}"),
    pytest.mark.skipif(not IS_ROOT, reason="the daemons of SLURM need root, and Linux"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
FirstJobId={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES
"""
# FirstJobId: ranks meet at a port made of it, another for each SLURM of this machine. cred_expire: a job that is queued
# again waits no longer. config_overrides: the node need not have 8 cores.


def wait_until(condition, what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def ask(*command: str) -> str:
    """Return what a command of SLURM prints, as long as its daemons answer; else nothing."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(number)]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="module")
def slurm():
    """Start the daemons and stop them, with all that they have started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        key, conf = folder / "munge.key", folder / "slurm.conf"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        conf.write_text(
            CONFIGURATION.format(host=socket.gethostname().split(".")[0], ports=free_ports(2), folder=folder)
        )
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHON", sys.executable)
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        try:
            stack.enter_context(daemon(folder, "munged", "--foreground", f"--key-file={key}", *options))
            wait_until((folder / "munge.socket").exists, "munged", 30)
            stack.enter_context(daemon(folder, "slurmctld", "-D"))
            stack.enter_context(daemon(folder, "slurmd", "-D", "-N", "localhost"))
            wait_until(lambda: ask("sinfo", "--noheader", "--format=%t") == "idle\n", "an idle node", 30)
        except TimeoutError as error:
            said = "".join(path.read_text()[-500:] for path in folder.glob("*.txt"))
            pytest.skip(f"SLURM does not start here: {error}\n{said}")
        stack.callback(end_jobs)
        yield


@contextmanager
def daemon(folder: Path, *command: str):
    with (folder / f"{command[0]}.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


def end_jobs() -> None:
    ask("scancel", "--user=root", "--signal=KILL", "--full")
    ask("scancel", "--user=root")
    wait_until(lambda: ask("squeue", "--noheader") == "", "all jobs end")


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


def wait_for_step(run: Path, step: int) -> None:
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > step, f"step {step} of {run}")


def task_of_rank(rank: int) -> int:
    """Return the process that SLURM has started as this rank."""
    pids = [int(pid) for pid in re.findall(r"^(\d+) .*\n", ask("scontrol", "listpids"), re.MULTILINE)]
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
    (found,) = (pid for pid in pids if f"SLURM_PROCID={rank}".encode() in variables[pid])
    return found


def test_ranks_of_srun_stop_at_scancel_and_go_on_to_what_one_device_computes(slurm, alone):
    run = Path("run")
    process = srun(2, *CELL.overrides, "placement=pipeline", "wandb=disabled", f"run_dir={run}")
    wait_for_step(run, 20)
    ask("scancel", "--name=train")
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
    os.kill(task_of_rank(1), signal.SIGKILL)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert "task 1: Killed" in said
    assert "error: the connection to rank 1 is lost: look what ended there first" in said and "go on with:" in said


# --- sbatch --------------------------------------------------------------------------------------------------------


def test_an_array_trains_a_study_through_scancel_and_the_end_of_its_time(slurm, alone):
    assert sweep.main([STUDY.name], ["--slurm=sweep.sh"], script=str(script_of(STUDY))) == 0
    run = run_directory(Path("runs/studies"), STUDY.name, CELL, 0)
    first = ask("sbatch", "--parsable", "sweep.sh").strip()
    wait_for_step(run, 20)
    ask("scancel", f"{first}_0")
    wait_until(lambda: ask("squeue", "--noheader") == "", "both jobs end")
    log = Path(f"runs/studies/slurm/{first}_0.log")
    assert "stopped by signal 15: call it again to go on" in log.read_text()
    assert RunDirectory.open(run).summary()["status"] == "interrupted"
    log = Path(f"runs/studies/slurm/{first}_1.log").read_text()
    assert "exit code 2: queued: cdp-train mode=dp dataset=cifar10: " in log and "0 of 1 runs are done" in log

    stopped = len(read_metrics(run / "metrics.jsonl"))
    second = ask("sbatch", "--parsable", "--array=0", "sweep.sh").strip()
    wait_for_step(run, stopped + 20)
    ask("scancel", "--batch", "--signal=USR2", f"{second}_0")  # what --signal= of the script asks for
    wait_until(lambda: ask("squeue", "--noheader") == "", "the job, queued again")
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
    ask("scontrol", "requeue", f"{array}_0")  # what a pre-emption does: SIGTERM, and a place in the queue
    wait_until(lambda: ask("squeue", "--noheader") == "", "both jobs, one of them queued again")
    assert "resumed at training step" in RunDirectory(run).log_path(0).read_text()
    assert read_metrics(run / "metrics.jsonl") == alone
    assert train_command.main(["--status=sweep"]) == 0
    shown = capsys.readouterr().out
    assert "cannot be cut into stages=8" in shown
    assert "2 runs: 1 finished, 1 failed" in shown
