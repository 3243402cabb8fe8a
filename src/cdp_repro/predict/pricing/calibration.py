"""Calibration: measures stages and links on this machine, for `cdp-plan price=true cluster.calibrate=true`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from cdp_repro.config import RunConfig
from cdp_repro.config.numerics import autocast, loss_fn
from cdp_repro.engine.compute import Network
from cdp_repro.engine.delivery import groups_of_directions
from cdp_repro.launch import launch
from cdp_repro.launch.process_group import process_group
from cdp_repro.predict.cutting import CutModel, sample
from cdp_repro.predict.pricing import Collectives, Link
from cdp_repro.predict.profiling import time_passes
from cdp_repro.schedule.transport import Edge

_SMALL, _LARGE = 8, 2**23
"""Bytes of the two messages whose times give latency and bandwidth."""
_IN_A_ROW = 4


def measure_stages(config: RunConfig, cut: CutModel) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of the forward, and of the backward, of each stage on one micro-batch, on `config.device`.

    Each is the median of five rounds after a warm-up round, alone on the device, with one thread on a CPU.
    """
    device, threads = config.torch_device, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stages = [stage.to(device) for stage in cut.stages]
        network = Network(stages, loss_fn, autocast(config, device.type), config.sources or ())
        forward, backward = time_passes(network, *sample(config, device))
    finally:
        torch.set_num_threads(threads)
        for stage in cut.stages:
            stage.to("cpu")
    return tuple(forward), tuple(backward)


def measure_network(rounds: int = 20) -> tuple[Link, Collectives]:
    """Measure the link between two processes of this machine, and gloo's collectives over it."""
    return network_of(launch(time_messages, (rounds,), 2))


def network_of(seconds: Mapping[str, float]) -> tuple[Link, Collectives]:
    """Return a link and the collectives over it from the seconds that `time_messages` has measured."""
    bandwidth = (_LARGE - _SMALL) / max(seconds["large"] - seconds["small"], 1e-9)
    link = Link(seconds["small"], bandwidth)
    half = link.latency_seconds + link.seconds(_LARGE / 2)  # of one trip round the ring, in which each rank sends half
    return link, Collectives(
        seconds["all_reduce"] / (2 * half), seconds["all_gather"] / half, seconds["reduce_scatter"] / half,
        on_streams=False,
    )  # fmt: skip


def time_messages(rounds: int) -> dict[str, float]:
    """Return the median seconds of messages and collectives between two ranks. Run by both of them.

    `small` and `large` are messages of 8 bytes and 8 MiB that both ranks send each other at once, as ranks of a full
    pipeline do. Collectives have 8 MiB in total.
    """
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with process_group(device, 2, timeout_seconds=60):
        groups = groups_of_directions([(0, 1), (1, 0)])
        small, large = (torch.zeros(size // 4) for size in (_SMALL, _LARGE))
        half = torch.zeros(_LARGE // 8)
        return {
            "small": _median_seconds(lambda: _exchange(small, groups), rounds),
            "large": _median_seconds(lambda: _exchange(large, groups), rounds),
            "all_reduce": _median_seconds(lambda: dist.all_reduce(large), rounds),
            "all_gather": _median_seconds(lambda: dist.all_gather_into_tensor(large, half), rounds),
            "reduce_scatter": _median_seconds(lambda: dist.reduce_scatter_tensor(half, large), rounds),
        }


def _exchange(message: torch.Tensor, groups: Mapping[Edge, dist.ProcessGroup]) -> None:
    rank, received = dist.get_rank(), torch.empty_like(message)
    for work in (
        dist.irecv(received, 1 - rank, group=groups[1 - rank, rank]),
        dist.isend(message, 1 - rank, group=groups[rank, 1 - rank]),
    ):
        assert work is not None, "both are members"
        work.wait()


def _median_seconds(exchange: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of one exchange, from several in a row, which keep the ranks in step."""
    samples = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            exchange()
        samples.append((time.perf_counter() - begin) / _IN_A_ROW)
    return statistics.median(samples[1:])
