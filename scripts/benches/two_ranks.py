"""Contenders on two ranks of one thread: what they train, how they are timed, and what cdp-plan promises."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benches.networks import on_random_images
from benches.timing import alternating_rounds, fastest_of, ratio_spread, sgd, steady_step_seconds
from cdp_repro import Engine
from cdp_repro.baselines import baseline_class
from cdp_repro.baselines.baseline import Baseline
from cdp_repro.baselines.torch_data_parallel import DDPBaseline
from cdp_repro.config import RunConfig
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.launch.process_group import process_group
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing import Cluster, Collectives, Link
from cdp_repro.predict.pricing.calibration import measure_stages
from cdp_repro.predict.pricing.quote import prices_on_each

DDP_BUCKETS = (1, 4, 25)
"""Bucket sizes in MiB that DDP is tried with; 25 is torch's default, with which most gradients of a small network can
leave only when the backward is done."""
TRIAL_ROUNDS, TRIAL_STEPS = 2, 2


def two_ranks(model: str, image_size: int, stages: int) -> RunConfig:
    """Return what is trained on two ranks of one thread."""
    workers, micro_batch = 2, 16
    os.environ["OMP_NUM_THREADS"] = "1"
    return replace(on_random_images(model, image_size, workers, workers * micro_batch, "time"), stages=stages)


def two_ranks_text(config: RunConfig, blocks: list[int], network: str) -> str:
    return (
        f"{config.model.name}, {config.input_shape[1]} px, N = {config.workers}, S = {config.stage_count}, micro-batch "
        f"{config.batch_size // config.workers}, fp32, {network}, one thread a process, stages cut by measured time "
        f"into {blocks} blocks"
    )


def throughput_over(seconds: dict[str, list[float]], mode: str, baseline: str) -> dict[str, float]:
    """Return the spread of the throughput of a mode over a baseline's."""
    return ratio_spread(seconds[baseline], seconds[mode])


def planned_seconds(config: RunConfig, blocks: list[int], network: tuple[Link, Collectives]) -> dict[str, float]:
    """Return the seconds of a step that cdp-plan promises, by mode and place, from stages timed on this machine."""
    cut = cut_model(config, blocks)
    forward, backward = measure_stages(config, cut)
    link, collectives = network
    cluster = Cluster(forward, backward, within_host=link, devices_per_host=config.workers, collectives=collectives)
    (prices,) = prices_on_each(config, cut, (cluster,))
    return {name: price.step_seconds for name, price in prices.items()}


def rounds_on_two_ranks(
    config: RunConfig,
    blocks: list[int],
    modes: tuple[str, ...],
    placement: str,
    baselines: tuple[str, ...],
    rounds: int,
    steps: int,
) -> tuple[dict[str, list[float]], float | None]:
    """Train all contenders in turns, a few steps each, in the same ranks.

    Returns:
        The seconds of each round, and the MiB of a bucket of DDP with which it was fastest, if it is a baseline here.
    """
    keep_freed_memory()
    with process_group(torch.device("cpu"), config.workers, 600):
        torch.manual_seed(0)
        size = config.batch_size
        batch = torch.randn(size, *config.input_shape), torch.randint(0, 10, (size,))

        def stages() -> list[torch.nn.Module]:
            return list(cut_model(config, blocks).stages)

        def made(name: str, bucket: float = DDPBaseline.bucket_cap_mb) -> Baseline:
            kind = type("DDP", (DDPBaseline,), {"bucket_cap_mb": bucket}) if name == "ddp" else baseline_class(name)
            return kind(stages(), F.cross_entropy, sgd, workers=config.workers)

        bucket = None
        if "ddp" in baselines:
            trials = {each: partial(steady_step_seconds, made("ddp", each), batch, TRIAL_STEPS) for each in DDP_BUCKETS}
            bucket = fastest_of(trials, TRIAL_ROUNDS)
        contenders: dict[str, Engine | Baseline] = {
            **{mode: Engine(stages(), F.cross_entropy, sgd, mode, placement, workers=config.workers) for mode in modes},
            **{name: made(name, bucket) if bucket else made(name) for name in baselines},
        }
        timed = {name: partial(steady_step_seconds, each, batch, steps) for name, each in contenders.items()}
        return alternating_rounds(timed, rounds), bucket
