"""The range of each setting, and the settings that exclude each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cdp_repro.baselines import BASELINES
from cdp_repro.config.errors import nearest
from cdp_repro.config.schema import RunConfig
from cdp_repro.schedule import MODES, PIPELINE_SCHEDULES, PLACEMENTS, SLOT_ORDERS, Program
from cdp_repro.schedule.sizes import check_divisible

PARTITIONS = ("flops", "parameters", "activations", "time")

_CHOICES = {
    "mode.name": (*MODES, "matrix"),
    "optim.name": ("sgd", "adamw"),
    "optim.schedule": ("constant", "step", "cosine"),
    "placement.name": tuple(PLACEMENTS),
    "baseline": (None, *BASELINES),
    "pipeline_schedule": PIPELINE_SCHEDULES,
    "partition": PARTITIONS,
    "slot_order": SLOT_ORDERS,
    "precision": ("fp32", "fp64", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "wandb": ("offline", "online", "disabled"),
}

_MINIMA = {
    **dict.fromkeys(
        ("workers", "accumulate", "replicas", "batch_size", "epochs", "timeout_seconds", "evaluate_every_epochs",
         "evaluation_batch_size", "checkpoint_every_steps", "keep_checkpoints", "log_every_steps",
         "optim.step_epochs", "dataset.channels", "dataset.image_size",
         "dataset.classes", "dataset.train_samples", "dataset.test_samples", "model.hidden", "model.depth",
         "cluster.devices_per_host", "cluster.bandwidth_bytes_per_second"), 1,
    ),
    **dict.fromkeys(
        ("seed", "traced_steps", "optim.lr", "optim.weight_decay", "optim.momentum", "optim.warmup_epochs",
         "optim.gamma", "dataset.loader_workers", "cluster.latency_seconds"), 0,
    ),
}  # fmt: skip

_OPTIONAL_MINIMA = {
    "stages": 1, "ranks": 1,
    "cluster.between_hosts_latency_seconds": 0, "cluster.between_hosts_bandwidth_bytes_per_second": 1,
    "cluster.flops_per_second": 1,
}  # fmt: skip


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def out_of_range(config: RunConfig) -> Iterable[tuple[str, str]]:
    """Yield each key whose value is out of range, with a sentence that says so."""
    for key, choices in _CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            names = [str(choice) for choice in choices if choice is not None]
            yield key, f"{key}={value}: choose {', '.join(names)}{nearest(str(value), names)}"
    for key, minimum in _MINIMA.items():
        value = _value(config, key)
        if not (value >= minimum and math.isfinite(value)):
            yield key, f"{key}={value}: must be a finite number, {minimum} or more"
    for key, least in _OPTIONAL_MINIMA.items():
        value = _value(config, key)
        if value is not None and not (value >= least and math.isfinite(value)):
            yield key, f"{key}={value}: must be a finite number, {least} or more"
    for key in ("model.dropout", "optim.beta1", "optim.beta2"):
        value = _value(config, key)
        if not 0 <= value < 1:
            yield key, f"{key}={value}: must be at least 0 and below 1"
    if config.seed >= 2**63:
        yield "seed", f"seed={config.seed}: must be below 2^63"


def inconsistent(config: RunConfig) -> Iterable[str]:
    """Yield a sentence for each pair of settings, all of them in range, that exclude each other."""
    for check in (_check_schedule, _check_batch_size):
        try:
            check(config)
        except ValueError as error:
            yield str(error)
    if config.baseline is not None:
        yield from _wrong_with_baseline(config)
    if config.price:
        yield from _wrong_with_cluster(config)


def _check_batch_size(config: RunConfig) -> None:
    check_divisible(config.batch_size, config.workers, config.accumulate, config.replicas)


def _check_schedule(config: RunConfig) -> None:
    """Raise ValueError for a schedule that cannot be made, or a matrix that the timeline cannot serve."""
    schedule = config.schedule()
    if config.mode.staleness is not None:  # named modes can be served on every placement
        Program(schedule)


def _wrong_with_cluster(config: RunConfig) -> Iterable[str]:
    cluster, stages = config.cluster, config.stage_count
    ways = [cluster.calibrate, cluster.flops_per_second is not None, cluster.forward_seconds is not None]
    if sum(ways) != 1:
        yield (
            f"price=true takes the seconds of stages from one source, not {sum(ways)}: give cluster.calibrate=true, "
            f"cluster.flops_per_second=1e13 or cluster.forward_seconds={[0.01] * stages}"
        )
    if cluster.backward_seconds is not None and cluster.forward_seconds is None:
        yield "cluster.backward_seconds has no effect without cluster.forward_seconds: give both"
    for name in ("forward_seconds", "backward_seconds", "update_seconds"):
        seconds = getattr(cluster, name)
        if seconds is not None and (len(seconds) != stages or not all(0 <= each < math.inf for each in seconds)):
            yield (
                f"cluster.{name}={seconds}: must be {stages} finite numbers, 0 or more, one a stage, e.g. "
                f"{[0.01] * stages}"
            )


def _wrong_with_baseline(config: RunConfig) -> Iterable[str]:
    if config.workers < 2:
        yield f"baseline={config.baseline} is for several processes, not for workers={config.workers}: use workers=2"
    if config.mode.name != "dp":
        yield f"baseline={config.baseline} trains by data parallelism, not by mode={config.mode.name}: use mode=dp"
    if config.placement.name != "single_device":
        yield f"baseline={config.baseline} places its stages itself: drop placement={config.placement.name}"
    if config.collectives:
        yield f"baseline={config.baseline} uses the library's collectives in any case: drop collectives=true"
    if config.replicas != 1:
        yield f"baseline={config.baseline} knows no replicas={config.replicas}: use workers={config.micro_batches}"
    if config.accumulate != 1:
        yield f"baseline={config.baseline} knows no accumulate={config.accumulate}: use workers={config.micro_batches}"
    if config.baseline in ("torch_gpipe", "torch_1f1b") and config.stage_count != config.workers:
        yield (
            f"baseline={config.baseline} runs one stage a process, not stages={config.stage_count} on "
            f"workers={config.workers}: use stages={config.workers}"
        )
