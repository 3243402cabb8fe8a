"""Measures on this machine what `cdp-plan price=true cluster.calibrate=true` computes with."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from cdp_repro.config import RunConfig
from cdp_repro.launch import launch
from cdp_repro.pricing import Link
from cdp_repro.process_group import process_group
from cdp_repro.profiling import time_passes
from cdp_repro.stages import CutModel, autocast, loss_fn, sample

_SMALL, _LARGE = 8, 2**23
"""Bytes of the two messages whose times give latency and bandwidth."""


def measure_stages(config: RunConfig, cut: CutModel) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of the forward, and of the backward, of each stage on one micro-batch, on `config.device`.

    The median of five rounds after one of warming up, alone on the device, with one thread on a CPU.
    """
    device, threads = config.torch_device, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stages = [stage.to(device) for stage in cut.stages]
        forward, backward = time_passes(
            stages, loss_fn, *sample(config, device), autocast=autocast(config, device.type)
        )
    finally:
        torch.set_num_threads(threads)
        for stage in cut.stages:
            stage.to("cpu")
    return tuple(forward), tuple(backward)


def measure_link(rounds: int = 20) -> Link:
    """Return latency and bandwidth of messages between two processes of this machine, by gloo.

    A ping-pong of 8 bytes and of 8 MiB: half the median time of a round is latency, and latency + bytes / bandwidth.
    """
    return link_of(*launch(ping_pong, (rounds,), 2))


def link_of(small: float, large: float) -> Link:
    """Return the link over which the two messages of `ping_pong` take so many seconds."""
    return Link(small, (_LARGE - _SMALL) / max(large - small, 1e-9))


def ping_pong(rounds: int) -> list[float]:
    """Return the median seconds that a small and a large message take, one way. Run by both of two ranks."""
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 2, timeout_seconds=60):
        return [_one_way(torch.zeros(size, dtype=torch.uint8), rounds) for size in (_SMALL, _LARGE)]


def _one_way(message: torch.Tensor, rounds: int) -> float:
    samples = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for sender in (0, 1):
            if dist.get_rank() == sender:
                dist.send(message, 1 - sender)
            else:
                dist.recv(message, sender)
        samples.append((time.perf_counter() - begin) / 2)
    return statistics.median(samples[1:])
