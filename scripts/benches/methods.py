"""What each method against delay takes of the time of a training step: the bench `methods`.

The settings are those that the studies of delay compare, on their networks; the report puts the ratios beside the
accuracy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benches.timing import Batch, alternating_rounds, ratio_spread, steady_step_seconds
from cdp_repro import Engine
from cdp_repro.config import RunConfig
from cdp_repro.config.keys import settings_of
from cdp_repro.config.known import compose_known
from cdp_repro.config.program_file import program_of
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.predict.cutting import cut_model, sample
from cdp_repro.report.tuning import setting_of
from cdp_repro.studies.delay_studies import CIFAR10, OPTIMIZER_KEYS, TEXT, Benchmark
from cdp_repro.training.assembly import build_engine

ROUNDS, STEPS = 8, 2
TRAINED_SAMPLES = 50_000
"""From which the schedule of learning rates counts epochs: here only that it is not over."""


def methods() -> dict[str, Any]:
    """Return the time of a step of each setting over data parallelism with the same optimizer, if it has that."""
    keep_freed_memory()  # as cdp-train does
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [row for benchmark in (CIFAR10, TEXT) for row in _rows(benchmark)]
    torch.set_num_threads(threads_before)
    networks = " and ".join(f"{each.title} ({each.base})" for each in (CIFAR10, TEXT))
    return {
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "config": f"{networks}, N = 4, single_device, fp32, one thread",
        "rows": rows,
    }


def _rows(benchmark: Benchmark) -> list[dict[str, Any]]:
    configs = {each: compose_known((*benchmark.base.split(), *each.split())) for each in benchmark.settings}
    contenders = {name: partial(steady_step_seconds, _engine(config), _batch(config), STEPS)
                  for name, config in configs.items()}  # fmt: skip
    seconds = alternating_rounds(contenders, ROUNDS)
    references = {_optimizer(config): name for name, config in reversed(configs.items()) if config.mode.name == "dp"}
    rows = []
    for name, config in configs.items():
        reference = references.get(_optimizer(config), benchmark.settings[0])
        over_dp = ratio_spread(seconds[name], seconds[reference])
        setting = list(setting_of(settings_of(config.to_dict())))
        rows.append({"dataset": config.dataset.name, "setting": setting, "overrides": name, "over_dp": over_dp})
        print(name, over_dp, flush=True)
    return rows


def _optimizer(config: RunConfig) -> tuple[object, ...]:
    settings = settings_of(config.to_dict())
    return tuple(settings[key] for key in OPTIMIZER_KEYS)


def _engine(config: RunConfig) -> Engine:
    torch.manual_seed(0)
    cut = cut_model(config)
    engine = build_engine(config, cut, TRAINED_SAMPLES, program_of(config, cut.costs.gradient_bytes))
    assert isinstance(engine, Engine)
    return engine


def _batch(config: RunConfig) -> Batch:
    """Return a mini-batch of random images, or tokens."""
    inputs, targets = (torch.cat([part] * config.spec().sizes.micro_batches) for part in sample(config, "cpu"))
    random = torch.randint(0, config.dataset.classes, targets.shape)
    return (random if config.task.is_text else torch.randn_like(inputs)), random
