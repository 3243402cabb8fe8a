"""What the engine costs over a training loop by hand: the bench `overhead`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge

from benches.networks import on_random_images
from benches.timing import alternating_rounds, ratio_spread, seconds_of, sgd
from cdp_repro import Engine
from cdp_repro.config import RunConfig
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.predict.cutting import cut_model
from cdp_repro.schedule import Op, Program, Schedule

ROUNDS = 16
STEPS_PER_ROUND = 4
"""Training steps one after the other, as a training has them: a run of the engine begins and drains its timeline, which
a training does once between checkpoints, and the first step after another contender's finds its memory cold."""
WORKERS, MICRO_BATCH = 4, 16
NETWORKS = (
    ("resnet18", 32, 4, 2),
    ("resnet18", 32, 4, 1),
    ("vit_tiny_patch16_224", 64, 8, 2),
    ("vit_tiny_patch16_224", 64, 8, 1),
)
"""Model, pixels, S, threads: kernels of the second are small."""


def overhead() -> dict[str, object]:
    """Step time of the engine over a hand-written gradient-accumulation loop."""
    keep_freed_memory()  # as cdp-train does; it is of the process, so of all contenders
    threads_before = torch.get_num_threads()
    rows = [_overhead_of(*network) for network in NETWORKS]
    torch.set_num_threads(threads_before)
    return {
        "config": f"N = {WORKERS}, micro-batch {MICRO_BATCH}, cdp_v2, single_device, fp32",
        "rounds": ROUNDS,
        "steps_per_round": STEPS_PER_ROUND,
        "rows": rows,
    }


def _overhead_of(model: str, pixels: int, stages: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    size = WORKERS * MICRO_BATCH
    config = replace(on_random_images(model, pixels, WORKERS, size, "flops"), stages=stages)
    torch.manual_seed(0)
    batch = torch.randn(size, *config.input_shape), torch.randint(0, 10, (size,))
    contenders = {
        "gradient accumulation": _accumulation_loop(config, batch),
        "the same order by hand": _loop_by_hand(config, batch),
        "engine": _engine_loop(config, batch, traced_steps=0),
        "engine, metering on": _engine_loop(config, batch, traced_steps=10**9),
    }
    seconds = alternating_rounds({name: partial(seconds_of, run) for name, run in contenders.items()}, ROUNDS)
    print(f"{model}, {threads} threads: {ROUNDS} rounds", flush=True)
    base = seconds.pop("gradient accumulation")
    over_base = {name: ratio_spread(each, base) for name, each in seconds.items()}
    return {"network": f"{model}, {pixels} px, S = {stages}", "threads": threads, "ratios": over_base}


def _accumulation_loop(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    model = torch.nn.Sequential(*cut_model(config).stages).train()
    optimizer = sgd(list(model.parameters()))

    def run() -> None:
        for _ in range(STEPS_PER_ROUND):
            for inputs, targets in zip(*(part.chunk(config.workers) for part in batch), strict=True):
                (F.cross_entropy(model(inputs), targets) / config.workers).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _loop_by_hand(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Return the forwards, backwards and updates of cdp_v2 in its order, by plain autograd: what the order costs.

    Two copies of the stages take turns in place of versions, and the second takes over the parameters of the first
    where an update keeps the version before: as much work, with other numbers.
    """
    workers, last = config.workers, config.stages - 1
    copies = [cut_model(config).stages for _ in range(2)]
    optimizers = [[sgd(list(stage.train().parameters())) for stage in stages] for stages in copies]
    parameters = [[[each.data for each in stage.parameters()] for stage in stages] for stages in copies]
    program = Program(Schedule.build("cdp_v2", workers, config.stages))
    actions = [action for slot in program.slots(STEPS_PER_ROUND) for action in slot.actions]

    def run() -> None:
        inputs, targets = ([*part.chunk(workers)] for part in batch)
        outputs: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor | None] = {}
        saved: dict[tuple[int, int], tuple[torch.Tensor, GradientEdge]] = {}
        for op, _, j, m, version, _, _, reads, _, frees in actions:
            if op is Op.UPDATE:
                old, new = (version - 1) % 2, version % 2
                if reads != frees:  # the version before is still read
                    torch._foreach_copy_(parameters[new][j], parameters[old][j])
                optimizers[old][j].step()
                optimizers[old][j].zero_grad()
            elif op is Op.FORWARD:
                read = outputs.pop(m).requires_grad_() if j else inputs[m % workers]
                output = copies[m // workers % 2][j](read)
                if j == last:
                    output = F.cross_entropy(output, targets[m % workers]) / workers
                saved[m, j] = read, get_gradient_edge(output)
                outputs[m], gradients[m] = output.detach(), None
            else:
                read, edge = saved.pop((m, j))
                torch.autograd.backward([edge], [gradients[m]])
                gradients[m] = read.grad

    return run


def _engine_loop(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor], traced_steps: int) -> Callable[[], None]:
    engine = Engine(
        cut_model(config).stages, F.cross_entropy, sgd, "cdp_v2", workers=config.workers, traced_steps=traced_steps
    )

    def run() -> None:
        for _ in engine.run([batch] * STEPS_PER_ROUND):
            pass

    return run
