"""Pipelines beside torch's, for one mini-batch: the bench `pipelines`.

Each schedule of torch first finds the number of micro-batches at which it is fastest. Then all run beside each other,
ours with the number of micro-batches of the schedule that it is compared with, `cdp_v2` with each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benches.timing import Batch, alternating_rounds, fastest_of, ratio_spread, sgd, steady_step_seconds
from cdp_repro import Engine
from cdp_repro.config import RunConfig
from cdp_repro.config.schema import DatasetConfig, ModelConfig
from cdp_repro.launch import launch
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.launch.process_group import process_group
from cdp_repro.predict.cutting import cut_model

RANKS, MINI_BATCH = 2, 32
MICRO_BATCHES = (2, 4, 8)
"""Into how many a mini-batch is cut: torch's schedules try all."""
TRIAL_ROUNDS, ROUNDS, STEPS = 2, 12, 3
LIBRARY: dict[str, tuple[Any, int]] = {
    "torch gpipe": (ScheduleGPipe, 1),
    "torch 1f1b": (Schedule1F1B, 1),
    "torch interleaved 1f1b": (ScheduleInterleaved1F1B, 2),
    "torch interleaved zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "torch zbv": (ScheduleZBVZeroBubble, 2),
}
"""Torch's schedules, with the stages that each has on a rank."""
COUNTERPARTS = {
    "gpipe": "torch gpipe",
    "one_f_one_b": "torch 1f1b",
    "interleaved": "torch interleaved 1f1b",
    "zero_bubble": "torch interleaved zero bubble",
}
"""Ours that torch has, too; of zero bubble it has no plain one."""

Networks = Mapping[int, Sequence[nn.Module]]
"""By stages that a rank has: the network, cut so. Each contender trains a copy."""


def pipelines() -> dict[str, Any]:
    """Return the time of a step of ours over that of torch's fastest, and over that of the same schedule of torch."""
    os.environ["OMP_NUM_THREADS"] = "1"
    cuts = {a_rank: cut_model(_config(a_rank * RANKS)) for a_rank in (1, 2)}
    best, seconds = launch(_rank, ({a_rank: list(cut.stages) for a_rank, cut in cuts.items()},), RANKS)
    blocks = [[*map(len, cut.block_names)] for cut in cuts.values()]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    fastest = min(LIBRARY, key=medians.__getitem__)

    def row(name: str) -> dict[str, Any]:
        mode, _, number = name.partition(", M = ")
        same = COUNTERPARTS.get(mode)
        over = {"the fastest": fastest, **({"the same": same} if same else {})}
        spreads = {kind: ratio_spread(seconds[name], seconds[other]) for kind, other in over.items()}
        return {"mode": mode, "micro_batches": int(number), "ratios": spreads}

    rows = [row(name) for name in seconds if name not in LIBRARY]
    return {
        "config": f"resnet18, 32 px, {RANKS} ranks, mini-batch {MINI_BATCH}, fp32, gloo on loopback, one thread a "
        f"process, stages cut by measured time into {' or '.join(map(str, blocks))} blocks",
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "fastest": fastest,
        "library": {
            name: {"micro_batches": best[name], "over_fastest": medians[name] / medians[fastest]} for name in LIBRARY
        },
        "rows": rows,
    }


def _config(stages: int) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig("synthetic", channels=3, image_size=32, classes=10),
        model=ModelConfig("resnet18"),
        workers=RANKS,
        stages=stages,
        batch_size=MINI_BATCH,
        partition="time",
    )


def _rank(networks: Networks) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Be one rank: return the best number of micro-batches of torch's schedules, and the seconds of all in each round.

    Ours are named with theirs: `gpipe, M = 4`.
    """
    keep_freed_memory()
    with process_group(torch.device("cpu"), RANKS, 600):
        torch.manual_seed(0)
        batch = torch.randn(MINI_BATCH, 3, 32, 32), torch.randint(0, 10, (MINI_BATCH,))
        best = {name: _fastest(name, networks, batch) for name in LIBRARY}
        contenders = {name: _library(name, number, networks, batch) for name, number in best.items()}
        chosen = [(mode, best[same]) for mode, same in COUNTERPARTS.items()]
        chosen += [("chimera", best[COUNTERPARTS["one_f_one_b"]]), *(("cdp_v2", number) for number in MICRO_BATCHES)]
        contenders |= {f"{mode}, M = {number}": _own(mode, number, networks, batch) for mode, number in chosen}
        return best, alternating_rounds(contenders, ROUNDS)


def _fastest(name: str, networks: Networks, batch: Batch) -> int:
    """Return the number of micro-batches at which a schedule of torch takes least time, the same on all ranks."""
    trials = {number: _library(name, number, networks, batch) for number in MICRO_BATCHES}
    return fastest_of(trials, TRIAL_ROUNDS)


def _own(mode: str, micro_batches: int, networks: Networks, batch: Batch) -> Callable[[], float]:
    """Return what runs a few training steps of a mode of ours and says the seconds of one."""
    stages, each = deepcopy([*networks[2 if mode == "interleaved" else 1]]), micro_batches // RANKS
    engine = Engine(stages, F.cross_entropy, sgd, mode, "pipeline", workers=RANKS, ranks=RANKS, accumulate=each)
    return partial(steady_step_seconds, engine, batch, STEPS)


def _library(name: str, micro_batches: int, networks: Networks, batch: Batch) -> Callable[[], float]:
    """Return what runs a few training steps of a schedule of torch and says the seconds of one."""
    kind, a_rank = LIBRARY[name]
    pipeline = LibraryPipeline(kind, deepcopy([*networks[a_rank]]), micro_batches, batch[0])
    return partial(_library_seconds, pipeline, batch)


class LibraryPipeline:
    """A schedule of torch on this rank, as its documentation says to use it."""

    def __init__(self, kind: Any, modules: Sequence[nn.Module], micro_batches: int, inputs: torch.Tensor) -> None:
        """`modules` are all stages, `inputs` a mini-batch."""
        rank, last = dist.get_rank(), len(modules) - 1
        is_v = kind is ScheduleZBVZeroBubble
        own = [rank, last - rank] if is_v else list(range(rank, last + 1, RANKS))
        shapes = _shapes(modules, inputs[: MINI_BATCH // micro_batches])
        self._reads, self._scores = 0 in own, last in own
        stages = [
            PipelineStage(modules[j], j, last + 1, torch.device("cpu"), input_args=shapes[j], output_args=shapes[j + 1])
            for j in own
        ]
        is_single = len(own) == 1
        self._schedule = kind(stages[0] if is_single else stages, micro_batches, F.cross_entropy, scale_grads=True)
        self._optimizer = sgd([parameter for j in own for parameter in modules[j].parameters()])

    def step(self, batch: Batch) -> None:
        """Make a training step."""
        self._optimizer.zero_grad()
        inputs, targets = batch
        self._schedule.step(
            *([inputs] if self._reads else []), target=targets if self._scores else None, return_outputs=False
        )
        self._optimizer.step()


def _shapes(modules: Sequence[nn.Module], inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return what goes into each stage, and what comes out of the last, without values."""
    found = [torch.empty_like(inputs, device="meta")]
    with torch.no_grad():
        for module in modules:
            inputs = module(inputs)
            found.append(torch.empty_like(inputs, device="meta").requires_grad_())
    return found


def _library_seconds(pipeline: LibraryPipeline, batch: Batch) -> float:
    """Return the mean seconds of a training step; each ends with a flush, so that they are alike."""
    pipeline.step(batch)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        pipeline.step(batch)
    return (time.perf_counter() - begin) / STEPS
