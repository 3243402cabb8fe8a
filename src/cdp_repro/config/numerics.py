"""How a run computes: number types, loss, and the method against delay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cdp_repro.config.schema import DelayConfig, RunConfig
from cdp_repro.engine.delay import DELAYS, DelayFactory


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of [B, ..., classes] logits and [B, ...] class numbers: a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Return the type of parameters and images; for `bf16` it is fp32, as only autocast uses bf16."""
    return torch.float64 if config.precision == "fp64" else torch.float32


def autocast(config: RunConfig, device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes the context in which forwards run: autocast for `bf16`, else an empty one."""
    if config.precision == "bf16":
        return lambda: torch.autocast(device_type, torch.bfloat16)
    return nullcontext


def delay_factory(config: DelayConfig) -> DelayFactory:
    """Return the function that makes a stage's method against delay."""
    method = DELAYS[config.name]
    return method if config.strength is None else partial(method, strength=config.strength)
