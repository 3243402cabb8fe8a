"""A real SLURM: its daemons on one host or several, with ports and a folder of their own.

It needs root and Debian's packages slurm-wlm and munge, or their like.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest

from cdp_repro.launch.in_rank import die_with_parent

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
LACKING = [tool for tool in TOOLS if shutil.which(tool) is None]
IS_ROOT = sys.platform == "linux" and os.geteuid() == 0
SECONDS = 300
NEEDS_SLURM = [
    pytest.mark.skipif(bool(LACKING), reason=f"SLURM is not installed: no {', '.join(LACKING)}"),
    pytest.mark.skipif(not IS_ROOT, reason="the daemons of SLURM need root, and Linux"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
FirstJobId={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
# FirstJobId: ranks meet at a port made of it, another for each SLURM of this machine. cred_expire: a job that is queued
# again waits no longer. config_overrides: a node need not have 8 cores.


class Host(Protocol):
    """Where a daemon runs."""

    @property
    def name(self) -> str:
        """As others look it up."""

    @property
    def address(self) -> str:
        """Its IPv4 address."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` there."""


@dataclass(frozen=True)
class ThisHost:
    """This machine, as it is."""

    name: str = "localhost"
    address: str = "127.0.0.1"

    def command(self, *arguments: str) -> list[str]:
        """Return `arguments`."""
        return [*arguments]


@dataclass(frozen=True)
class Slurm:
    """A SLURM that runs; its commands are called on the first host."""

    hosts: Sequence[Host]

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM prints, as long as its daemons answer; else nothing."""
        return subprocess.run(self.hosts[0].command(*command), capture_output=True, text=True, timeout=SECONDS).stdout

    def wait_until_done(self, what: str) -> None:
        """Wait until no job is queued or runs."""
        wait_until(lambda: self.ask("squeue", "--noheader") == "", what)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def wait_for_step(run: Path, step: int) -> None:
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > step, f"step {step} of {run}")


@contextmanager
def slurm_on(*hosts: Host):
    """Start the daemons, slurmctld on the first host; stop them in the end, with all that they have started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        key, conf, slurm = folder / "munge.key", folder / "slurm.conf", Slurm(hosts)
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for name in ("state", *(f"spool-{host.name}" for host in hosts)):
            (folder / name).mkdir()
        conf.write_text(_configuration(folder, hosts))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "src"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHON", sys.executable)
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        try:
            munged = ("munged", "--foreground", f"--key-file={key}", *options)  # all hosts see its socket
            stack.enter_context(_daemon(folder / "munged.txt", *hosts[0].command(*munged)))
            wait_until((folder / "munge.socket").exists, "munged", 30)
            stack.enter_context(_daemon(folder / "slurmctld.txt", *hosts[0].command("slurmctld", "-D")))
            for host in hosts:
                slurmd = host.command("slurmd", "-D", "-N", host.name)
                stack.enter_context(_daemon(folder / f"slurmd-{host.name}.txt", *slurmd))
            idle = f"idle {len(hosts)}\n"
            wait_until(lambda: slurm.ask("sinfo", "--noheader", "--format=%t %D") == idle, "idle nodes", 30)
        except TimeoutError as error:
            said = "".join(path.read_text()[-500:] for path in folder.glob("*.txt"))
            pytest.skip(f"SLURM does not start here: {error}\n{said}")
        stack.callback(_end_jobs, slurm)
        yield slurm


def _configuration(folder: Path, hosts: Sequence[Host]) -> str:
    own_name = socket.gethostname().split(".")[0]
    real = {host: own_name if host == ThisHost() else host.name for host in hosts}
    nodes = [f"NodeName={host.name} NodeHostname={real[host]} NodeAddr={host.address} CPUs=8" for host in hosts]
    return CONFIGURATION.format(
        host=real[hosts[0]], address=hosts[0].address, ports=_free_ports(2), folder=folder, nodes="\n".join(nodes)
    )


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(number)]
        return [server.getsockname()[1] for server in servers]


@contextmanager
def _daemon(output: Path, *command: str):
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


def _end_jobs(slurm: Slurm) -> None:
    slurm.ask("scancel", "--user=root", "--signal=KILL", "--full")
    slurm.ask("scancel", "--user=root")
    slurm.wait_until_done("all jobs end")
