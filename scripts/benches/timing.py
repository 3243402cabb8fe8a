"""How contenders are timed: in turns, in alternating rounds in the same process, or in the same ranks.

They are compared round by round, as ratios with their spread. `sgd` is the optimizer of all but those of the benches
`methods` and `servers`, which have their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from cdp_repro import Engine
from cdp_repro.baselines.baseline import Baseline

Batch = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


def alternating_rounds(contenders: Mapping[T, Callable[[], float]], rounds: int) -> dict[T, list[float]]:
    """Let each contender say its seconds in every round, in turns from both ends; the first round only warms up."""
    seconds: dict[T, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in list(contenders) if number % 2 == 0 else list(contenders)[::-1]:
            seconds[name].append(contenders[name]())
    return {name: samples[1:] for name, samples in seconds.items()}


def fastest_of(contenders: Mapping[T, Callable[[], float]], rounds: int) -> T:
    """Return the contender that takes least time in its best round, the same on all ranks."""
    seconds = torch.tensor([min(each) for each in alternating_rounds(contenders, rounds).values()])
    dist.all_reduce(seconds)
    return [*contenders][int(seconds.argmin())]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and range."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": median, "quartile_low": low, "quartile_high": high, "min": min(ratios), "max": max(ratios)}


def ratio_spread(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the spread of ours over theirs, round by round."""
    return spread([own / other for own, other in zip(ours, theirs, strict=True)])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of contenders that are compared with a library, or with loops by hand."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


def steady_step_seconds(engine: Engine | Baseline, batch: Batch, steps: int) -> float:
    """Return the mean seconds of a training step in the middle of a run: between its fill and its drain.

    The last two steps are of the drain: a rank that reads old parameters updates the second to last with the last.
    """
    if dist.is_initialized():
        dist.barrier()
    times = []
    for _ in engine.run([batch] * (steps + 4)):
        times.append(time.perf_counter())
    return (times[-3] - times[1]) / (len(times) - 4)


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
