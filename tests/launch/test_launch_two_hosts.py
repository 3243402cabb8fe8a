"""Two hosts, each with its own torchrun: every placement trains across them as it does on one device."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import TINY
from training.test_trainer_placements import config_of, same_outcome

from cdp_repro.training.run import train

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from two_hosts import NoHostsError, two_hosts  # noqa: E402 - found by the path above

SETTINGS = (*TINY, "precision=fp64", "workers=2", "mode=cdp_v2")
SECONDS = 120


@pytest.fixture
def hosts():
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except NoHostsError as error:
            pytest.skip(f"no two hosts: {error}")
        yield pair


def torchrun(hosts, processes, arguments, folder):
    """Train under a torchrun on each host, with so many processes; return exit codes (None: too late) and outputs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400"]
    outputs = [folder / f"{host.name}.txt" for host in hosts]
    agents = []
    for host, number, output in zip(hosts, processes, outputs, strict=True):
        start = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={number}"]
        command = host.command(*start, "-m", "cdp_repro.cli.train", *arguments)
        with output.open("w") as file:
            agents.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + SECONDS
    while None in (codes := [agent.poll() for agent in agents]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return codes, [output.read_text() for output in outputs]


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


def test_a_machine_that_cannot_make_hosts_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoHostsError, match="`unshare` of util-linux is not installed"), two_hosts():
        pass
