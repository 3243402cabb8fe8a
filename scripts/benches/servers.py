"""Training steps over parameter servers on limited links: the bench `servers`.

Every rank is a host of its own, with a cable to one switch. More servers share the bytes of the same stages.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benches.on_hosts import run_on_hosts
from benches.timing import spread, steady_step_seconds
from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.launch.process_group import process_group
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing import Cluster, Link, price
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.schedule import Program, Schedule
from two_hosts import star

MODES = ("dp", "cdp_v1", "cdp_v2")
WORKERS, STAGES, SERVERS = 2, 4, (1, 2, 4)
WIDTH, MICRO_BATCH = 512, 16
"""A stage has 512 x 512 weights: 1 MiB."""
RATE_MBIT = 200
ROUNDS, STEPS = 4, 4


def servers() -> dict[str, Any]:
    """Return the time of a training step with each number of servers over that with one, measured and priced."""
    rounds = [{number: _measured(number) for number in SERVERS[:: (-1) ** k]} for k in range(ROUNDS)]
    costs, compute = _costs(), _compute_seconds()
    rows = []
    for mode in MODES:
        priced = {number: _priced(mode, number, costs, compute) for number in SERVERS}
        for number in SERVERS[1:]:
            ratios = [each[number][mode] / each[SERVERS[0]][mode] for each in rounds]
            row = {"mode": mode, "servers": number, **spread(ratios), "priced": priced[number] / priced[SERVERS[0]]}
            print(row, flush=True)
            rows.append(row)
    return {
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "config": f"N = {WORKERS}, S = {STAGES} stages of {WIDTH} x {WIDTH} weights, micro-batch {MICRO_BATCH}, fp32, "
        f"gloo between network namespaces around a switch, {RATE_MBIT} Mbit/s each by tbf, one thread a process",
        "rows": rows,
    }


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


def _batch(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = MICRO_BATCH * micro_batches
    return torch.randn(size, WIDTH), torch.randint(0, WIDTH, (size,))


def _engine(mode: str, placement: str, number: int | None) -> Engine:
    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Engine(_stages(), F.cross_entropy, sgd, mode, placement, workers=WORKERS, servers=number)


def _measured(number: int) -> dict[str, float]:
    """Return the seconds of a training step of each mode with so many servers."""
    with star(WORKERS + number, RATE_MBIT) as hosts:
        found: dict[str, float] = run_on_hosts(hosts, "benches.servers", [str(number)])
        return found


def _rank(number: int, path: Path) -> None:
    """Be one rank: train each mode in turn."""
    keep_freed_memory()
    seconds = {}
    with process_group(torch.device("cpu"), WORKERS + number, 600):
        for mode in MODES:
            engine = _engine(mode, "parameter_server", number)
            seconds[mode] = steady_step_seconds(engine, _batch(WORKERS), STEPS)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(seconds))


def _costs() -> StageCosts:
    inputs, targets = _batch(1)
    return profile_stages(Network(_stages(), F.cross_entropy), inputs, targets)


def _compute_seconds() -> float:
    """Return the seconds of a stage, forward and backward, on one micro-batch."""
    engine = _engine("dp", "single_device", None)
    return steady_step_seconds(engine, _batch(WORKERS), STEPS) / (WORKERS * STAGES)


def _priced(mode: str, number: int, costs: StageCosts, compute: float) -> float:
    """Return the seconds of a training step that a price says."""
    link = Link(bandwidth_bytes_per_second=RATE_MBIT * 1e6 / 8)
    forward, backward = ((share * compute,) * STAGES for share in (1 / 3, 2 / 3))
    cluster = Cluster(forward, backward, within_host=link, between_hosts=link)
    schedule = Schedule.build(
        mode, WORKERS, STAGES, "parameter_server", servers=number, gradient_bytes=costs.gradient_bytes
    )
    return price(Program(schedule), costs, cluster).step_seconds


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
