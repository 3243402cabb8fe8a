"""The range of each setting on its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from operator import attrgetter

from cdp_repro.baselines import BASELINES
from cdp_repro.config.errors import nearest
from cdp_repro.config.schema import RunConfig
from cdp_repro.schedule import MODES, PIPELINE_SCHEDULES, PLACEMENTS, SLOT_ORDERS

_CHOICES: dict[str, Collection[str | None]] = {
    "mode.name": MODES,
    "placement.name": PLACEMENTS,
    "optim.name": ("sgd", "adamw", "nadamw", "muon"),
    "delay.name": ("none", "error_feedback", "prediction", "compensation"),  # as engine.delay.DELAYS, which needs torch
    "dataset.tokens": ("bytes", "characters"),
    "optim.schedule": ("constant", "step", "cosine"),
    "baseline": (None, *BASELINES),
    "pipeline_schedule": PIPELINE_SCHEDULES,
    "partition": ("flops", "parameters", "activations", "time"),
    "slot_order": SLOT_ORDERS,
    "precision": ("fp32", "fp64", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "wandb": ("offline", "online", "disabled"),
}

_MINIMA = {
    **dict.fromkeys(
        ("workers", "accumulate", "replicas", "batch_size", "epochs", "timeout_seconds", "grace_seconds",
         "evaluate_every_epochs", "evaluation_batch_size", "checkpoint_every_steps", "keep_checkpoints",
         "log_every_steps", "optim.step_epochs", "dataset.channels", "dataset.image_size",
         "dataset.classes", "dataset.train_samples", "dataset.test_samples", "model.hidden", "model.depth",
         "model.width", "model.heads", "model.context",
         "cluster.devices_per_host", "cluster.bandwidth_bytes_per_second"), 1,
    ),
    **dict.fromkeys(
        ("seed", "optim.lr", "optim.weight_decay", "optim.warmup_epochs", "optim.gamma",
         "dataset.loader_workers", "cluster.latency_seconds"), 0,
    ),
    "stages": 1, "ranks": 1, "servers": 1, "jitter": 0, "message_time": 0, "slack": 0, "slices": 1, "micro_batches": 1,
    "traced_steps": 0,
    "delay.strength": 0,
    "cluster.between_hosts_latency_seconds": 0, "cluster.between_hosts_bandwidth_bytes_per_second": 1,
    "cluster.flops_per_second": 1,
}  # fmt: skip

_LARGEST_SIZES = {
    **dict.fromkeys(
        ("timeout_seconds", "grace_seconds", "workers", "stages", "accumulate", "replicas", "ranks", "servers",
         "micro_batches", "batch_size", "evaluation_batch_size", "dataset.channels", "dataset.image_size",
         "dataset.classes", "dataset.train_samples", "dataset.test_samples", "model.hidden", "model.width",
         "model.heads", "model.context"), 2**31 - 1,
    ),
    "model.depth": 1000,  # a model of more blocks takes seconds to build and to measure
}  # fmt: skip
"""The largest value of a whole number."""
LARGEST_RATE = 1e38
LARGEST_SECONDS = 1e9
"""Thirty years; prices of more would overflow."""
_MAXIMA = {
    **dict.fromkeys(("optim.lr", "optim.weight_decay", "delay.strength"), (LARGEST_RATE, ", beyond which fp32 ends")),
    **dict.fromkeys(("cluster.latency_seconds", "cluster.between_hosts_latency_seconds"), (LARGEST_SECONDS, "")),
    **dict.fromkeys(
        ("cluster.bandwidth_bytes_per_second", "cluster.between_hosts_bandwidth_bytes_per_second"), (1e18, "")
    ),
    "cluster.flops_per_second": (1e24, ""),
}
"""The largest value of a setting, and why."""


def out_of_range(config: RunConfig) -> Iterable[tuple[str, str]]:
    """Yield each key whose value is out of range, with a sentence that says so."""
    for key, choices in _CHOICES.items():
        value = attrgetter(key)(config)
        if value not in choices and (key, value) != ("mode.name", "matrix"):
            names = [str(choice) for choice in choices if choice is not None]
            yield key, f"{key}={value}: choose {', '.join(names)}{nearest(str(value), names)}"
    for key, minimum in _MINIMA.items():
        value = attrgetter(key)(config)
        if value is not None and not (value >= minimum and math.isfinite(value)):
            yield key, f"{key}={value}: must be {_finite(value)}{minimum} or more"
    if config.optim.clip_norm is not None and not 0 < config.optim.clip_norm < math.inf:
        yield (
            "optim.clip_norm",
            f"optim.clip_norm={config.optim.clip_norm}: must be a finite number above 0, such as 1.0",
        )
    for key in ("model.dropout", "optim.momentum", "optim.beta1", "optim.beta2"):
        value = attrgetter(key)(config)
        if not 0 <= value < 1:
            yield key, f"{key}={value}: must be at least 0 and below 1"
    for key, (most, why) in _MAXIMA.items():
        value = attrgetter(key)(config)
        if value is not None and most < value < math.inf:
            yield key, f"{key}={value}: must be at most {most:g}{why}"
    for key, largest in _LARGEST_SIZES.items():
        value = attrgetter(key)(config)
        if value is not None and value > largest:
            yield key, f"{key}={value}: must be at most {largest}"
    if config.seed >= 2**63:
        yield "seed", f"seed={config.seed}: must be below 2^63"


def _finite(value: float) -> str:
    """Return the beginning of what a number must be: a whole one is finite anyway."""
    return "" if isinstance(value, int) else "a finite number, "
