"""Two hosts, each with its own torchrun: every placement trains across them as it does on one device."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import TINY
from training.test_trainer_placements import config_of, same_outcome

from cdp_repro.training.run import train

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from two_hosts import NoHostsError, two_hosts, vanish  # noqa: E402 - found by the path above

SETTINGS = (*TINY, "precision=fp64", "workers=2", "mode=cdp_v2")
SECONDS = 240
STALL_SECONDS = 20.0
SLOW = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1mbit", "burst", "256kbit", "latency", "50ms")


@pytest.fixture
def hosts():
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except NoHostsError as error:
            pytest.skip(f"no two hosts: {error}")
        yield pair


@contextmanager
def torchruns(hosts, processes, arguments, folder, program=("-m", "cdp_repro.cli.train"), **variables):
    """Train under a torchrun on each host, with so many processes; give both, and the files of their outputs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **variables}
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400"]
    outputs = [folder / f"{host.name}.txt" for host in hosts]
    agents = []
    for host, number, output in zip(hosts, processes, outputs, strict=True):
        start = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={number}"]
        command = host.command(*start, *program, *arguments)
        with output.open("w") as file:
            agents.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        yield agents, outputs
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def ended(agents):
    """Return exit codes; None: too late."""
    deadline = time.monotonic() + SECONDS
    while None in (codes := [agent.poll() for agent in agents]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return codes


def torchrun(hosts, processes, arguments, folder):
    """Train under a torchrun on each host, with so many processes; return exit codes (None: too late) and outputs."""
    with torchruns(hosts, processes, arguments, folder) as (agents, outputs):
        return ended(agents), [output.read_text() for output in outputs]


def bytes_sent(host) -> int:
    table = subprocess.run(host.command("cat", "/proc/net/dev"), capture_output=True, text=True, check=True).stdout
    (row,) = (line.split() for line in table.splitlines() if line.split()[0] == "eth0:")
    return int(row[9])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(config_of(TINY, "mode=cdp_v2"), folder, ["test"])
    return folder


@pytest.mark.parametrize(
    ("placement", "processes"),
    [("replicated", (1, 1)), ("zero", (1, 1)), ("model_parallel", (2, 1)), ("pipeline", (1, 1))],
)
def test_two_hosts_train_as_one_device_does(tmp_path, hosts, alone, placement, processes):
    run = tmp_path / "run"
    codes, shown = torchrun(hosts, processes, [*SETTINGS, f"placement={placement}", f"run_dir={run}"], tmp_path)
    assert codes == [0, 0], "\n".join(shown)
    same_outcome(run, alone)
    with (run / "comms.csv").open() as file:
        messages = [{name: row[name] for name in ("source", "destination", "bytes")} for row in csv.DictReader(file)]
    for number, host in enumerate(hosts):
        here = [str(rank) for rank in range(sum(processes)) if (rank >= processes[0]) == number]
        assert all((run / "logs" / f"rank{rank}.log").exists() for rank in here)
        crossing = [int(m["bytes"]) for m in messages if m["source"] in here and m["destination"] not in here]
        assert bytes_sent(host) > sum(crossing) > 0


# Faults of the network, with four ranks


@contextmanager
def slow_run(hosts, run, folder, *settings):
    """Train by data parallelism on four ranks, two a host; give the agents and outputs at training step 3."""
    told = folder / "told"
    arguments = [*TINY, "precision=fp64", "workers=2", "mode=dp", "placement=model_parallel", f"run_dir={run}"]
    variables = {"KILL_MOMENT": "training", "KILL_STEP": "3", "KILL_FILE": str(told)}
    program = [str(ROOT / "scripts" / "kill_moments.py")]
    with torchruns(hosts, (2, 2), [*arguments, *settings], folder, program, **variables) as (agents, outputs):
        deadline = time.monotonic() + SECONDS
        while not told.exists() and time.monotonic() < deadline and None in [agent.poll() for agent in agents]:
            time.sleep(0.02)
        assert told.exists(), "\n".join(output.read_text() for output in outputs)
        yield agents, outputs


def of_link(host, *command):
    subprocess.run(host.command(*command), check=True)


def test_a_link_that_slows_down_and_stalls_is_waited_for(tmp_path, hosts):
    train(config_of(TINY, "mode=dp"), tmp_path / "alone", ["test"])
    with slow_run(hosts, tmp_path / "run", tmp_path) as (agents, outputs):
        of_link(hosts[0], *SLOW)
        of_link(hosts[0], "ip", "link", "set", "eth0", "down")
        time.sleep(STALL_SECONDS)
        of_link(hosts[0], "ip", "link", "set", "eth0", "up")
        assert ended(agents) == [0, 0], "\n".join(output.read_text() for output in outputs)
    same_outcome(tmp_path / "run", tmp_path / "alone")


def of_ranks(host) -> bool:
    """Return whether ranks run on this host; what runs there besides is torchrun, which has its own patience."""
    shown = subprocess.run(host.command("sh", "-c", "cat /proc/[0-9]*/cmdline"), capture_output=True).stdout
    return re.search(rb"-u\0[^\0]*kill_moments.py\0", shown) is not None


LOST = "ranks {} stall: the others have waited for timeout_seconds in vain"
STORE_LOST = "the store at which the ranks have met is gone"


@pytest.mark.parametrize(
    ("gone", "causes"),
    [(None, (LOST.format("2, 3"), STORE_LOST)), (0, (None, STORE_LOST)), (1, (LOST.format("2, 3"), None))],
    ids=["link", "host of rank 0", "other host"],
)
def test_a_link_or_a_host_that_is_gone_ends_all_ranks_with_the_cause(tmp_path, hosts, gone, causes):
    with slow_run(hosts, tmp_path / "run", tmp_path, "timeout_seconds=20") as (_, outputs):
        left = [number for number in (0, 1) if causes[number]]
        assert all(of_ranks(hosts[number]) for number in left)
        if gone is None:
            of_link(hosts[0], "ip", "link", "set", "eth0", "down")
        else:
            vanish(hosts, gone)
        deadline = time.monotonic() + 60
        while any(of_ranks(hosts[number]) for number in left) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(of_ranks(hosts[number]) for number in left)
        for number in left:
            shown = outputs[number].read_text()
            assert f"error: {causes[number]}" in shown
            assert f"go on with: cdp-train resume={tmp_path / 'run'}" in shown


def test_a_machine_that_cannot_make_hosts_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoHostsError, match="`unshare` of util-linux is not installed"), two_hosts():
        pass
