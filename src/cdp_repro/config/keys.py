"""Settings by dotted key (`optim.lr`), and the sets of keys that a run, a resume and a sweep treat in a special way.

A new setting is in none of these sets until someone adds it: by default it counts as one that changes the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.config.schema import ClusterConfig, RunConfig

SCHEDULE_KEYS = frozenset({
    "workers", "stages", "accumulate", "replicas", "ranks", "servers", "batch_size", "slot_order",
    "speeds", "jitter", "message_time", "slack", "slices", "micro_batches", "mode.name", "mode.staleness",
    "placement.name", "pipeline_schedule", "collectives",
})  # fmt: skip
"""Settings of the schedule, and the batch size. Whether they fit together is checked only if each is in range."""

PLACEMENT_KEYS = ("placement.name", "ranks", "servers", "pipeline_schedule", "collectives")
"""Settings that say where and how the same numbers are computed."""

NEUTRAL_KEYS = (
    "run_dir", "wandb", "wandb_project", "keep_checkpoints", "checkpoint_every_steps", "log_every_steps",
    "traced_steps", "evaluation_batch_size", "timeout_seconds", "grace_seconds", *PLACEMENT_KEYS, "dataset.root",
    "dataset.download", "dataset.loader_workers", "price", "program",
    *(f"cluster.{each.name}" for each in fields(ClusterConfig)),
)  # fmt: skip
"""Settings that do not change the parameters (`collectives` changes only their last bits). They may differ between a
checkpoint and the run that resumes from it."""

RESUME_KEYS = (
    "ranks", "servers", "pipeline_schedule", "collectives", "program", "dataset.root", "dataset.loader_workers",
    "timeout_seconds", "grace_seconds", "wandb", "checkpoint_every_steps", "log_every_steps",
)  # fmt: skip
"""Settings that may be given beside `resume=`; the group `placement=` may, too."""

SWEEP_KEYS = (
    "dataset.root", "dataset.download", "dataset.loader_workers", "wandb", "wandb_project", "keep_checkpoints",
    "checkpoint_every_steps", "log_every_steps", "timeout_seconds", "grace_seconds",
)  # fmt: skip
"""Settings that may be given to a sweep over studies: they change no number in the row of a run."""

RUN_KEYS = frozenset(NEUTRAL_KEYS) - {*PLACEMENT_KEYS} | {"seed"}
"""Settings in which the runs of one cell may differ. Placement is not among them: it changes bytes and seconds."""


EXAMPLES = {
    "mode.staleness": "mode='[[1,1],[1,0]]' workers=2",
    "dataset.name": "dataset.name=my_data",  # only dataset=installed leaves it out
    "dataset.root": "dataset=cifar10 dataset.root=data",
    "model.name": "model.name=resnet50",
    "model.weights": "model.weights=weights.safetensors",
    "optim.clip_norm": "optim.clip_norm=1.0",
    "delay.strength": "delay=compensation delay.strength=0.5",
    "stages": "stages=4",
    "ranks": "ranks=2",
    "servers": "servers=2",
    "speeds": "speeds=[1,1,1,2]",
    "jitter": "jitter=0",
    "message_time": "message_time=0.5",
    "slack": "slack=3",
    "slices": "slices=2",
    "micro_batches": "micro_batches=6",
    "baseline": "baseline=ddp mode=dp",
    "run_dir": "run_dir=runs/first",
    "traced_steps": "traced_steps=10",
    "program": "program=program.txt",
    "cluster.between_hosts_latency_seconds": "cluster.between_hosts_latency_seconds=1e-5",
    "cluster.between_hosts_bandwidth_bytes_per_second": "cluster.between_hosts_bandwidth_bytes_per_second=1e9",
    "cluster.flops_per_second": "cluster.flops_per_second=1e13",
    "cluster.forward_seconds": "cluster.forward_seconds=[0.01,0.01]",
    "cluster.backward_seconds": "cluster.backward_seconds=[0.02,0.02]",
    "cluster.update_seconds": "cluster.update_seconds=[0.001,0.001]",
}
"""Overrides to suggest for settings whose default is not a useful example."""


def changeable(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that may differ when a sweep goes on with a run.

    These are the ones that may be given both beside `resume=` and to a sweep over studies.
    """
    return [text for text in overrides if is_changeable(text.partition("=")[0])]


def is_changeable(key: str) -> bool:
    """Whether a setting may differ when a sweep goes on with a run."""
    return key in RESUME_KEYS and key in SWEEP_KEYS


def example_of(key: str) -> str:
    """Return an override of `key` to suggest: one from `EXAMPLES`, or else the default."""
    return EXAMPLES.get(key, f"{key}={defaults()[key]}")


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key; settings that an older version lacks get their defaults."""
    return {**defaults(), **flat(config)}


@cache
def defaults() -> Mapping[str, Any]:
    """Return the default of every setting by dotted key."""
    return flat(RunConfig().to_dict())


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def leaves(node: DictConfig, prefix: str = "", tolerant: bool = False) -> list[tuple[str, Any]]:
    """Return every value with its dotted key: interpolations resolved, lists whole, missing values as MISSING.

    With `tolerant`, an interpolation that cannot be resolved stands for None: a later override may replace it.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    found: list[tuple[str, Any]] = []
    for key in map(str, node):
        name = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            found.append((name, MISSING))
            continue
        try:
            value = node[key]
        except OmegaConfBaseException:
            if not tolerant:
                raise
            value = None
        if isinstance(value, DictConfig):
            found += leaves(value, f"{name}.", tolerant)
        else:
            found.append(
                (name, OmegaConf.to_container(value, resolve=not tolerant) if OmegaConf.is_list(value) else value)
            )
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return {**value}
