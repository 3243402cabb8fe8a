"""A real SLURM of two nodes: each run of a sweep has its ranks on both."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import TINY
from slurm_daemons import NEEDS_SLURM, SECONDS, slurm_on, wait_for_step

from cdp_repro.config.compose import compose_config
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.training.run import train

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from two_hosts import NoHostsError, two_hosts

pytestmark = NEEDS_SLURM

SETTINGS = (
    *(text for text in TINY if not text.startswith(("epochs", "dataset.train"))),
    "mode=cdp_v2", "workers=2", "dataset.train_samples=1600", "epochs=4",
)  # fmt: skip


@pytest.fixture
def slurm():
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NoHostsError as error:
            pytest.skip(f"no two hosts: {error}")
        yield stack.enter_context(slurm_on(*hosts))


def test_a_sweep_over_two_nodes_is_preempted_and_ends_as_on_one_device(slurm, tmp_path):
    train(compose_config([*SETTINGS]), tmp_path / "alone", ["test"])
    sweep = tmp_path / "sweep"
    words = [*SETTINGS, "placement=pipeline,zero", f"run_dir={sweep}"]
    launcher = ["launcher=slurm", "launcher.nodes=2", "launcher.cpus_per_task=4"]
    start = slurm.hosts[0].command(sys.executable, "-m", "cdp_repro.cli.train", "-m", *words, *launcher)
    done = subprocess.run(start, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    (array,) = re.findall(r"queued 2 runs as array (\d+)", done.stdout)
    runs = [sweep / f"placement={name}" for name in ("pipeline", "zero")]
    wait_for_step(runs[0], 20)
    assert [ranks_on(host) for host in slurm.hosts] == [1, 1]
    slurm.ask("scontrol", "requeue", f"{array}_0")
    slurm.wait_until_done("both jobs, one of them queued again")
    said = [path.read_text() for path in sorted((sweep / "slurm").glob("*.log"))]
    for run in runs:
        assert read_metrics(run / "metrics.jsonl") == read_metrics(tmp_path / "alone" / "metrics.jsonl"), said
    assert "resumed at training step" in RunDirectory(runs[0]).log_path(0).read_text()


def ranks_on(host) -> int:
    """Return how many processes there were started by srun as ranks that train."""
    pids = subprocess.run(host.command("pgrep", "-f", "cdp_repro.cli.train"), capture_output=True, text=True).stdout
    variables = [host.command("cat", f"/proc/{pid}/environ") for pid in pids.split()]
    found = [subprocess.run(command, capture_output=True).stdout for command in variables]
    return len({each for text in found for each in text.split(b"\0") if each.startswith(b"SLURM_PROCID=")})
