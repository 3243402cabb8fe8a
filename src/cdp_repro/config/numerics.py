"""Number types of a run, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from cdp_repro.config.schema import RunConfig

loss_fn = F.cross_entropy
"""(logits [B, classes], class numbers [B]) -> scalar mean over the micro-batch."""


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Return the type of parameters and images; with bf16 autocast that is fp32."""
    return torch.float64 if config.precision == "fp64" else torch.float32


def autocast(config: RunConfig, device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of the context in which forwards run: autocast for bf16, else an empty one."""
    if config.precision == "bf16":
        return lambda: torch.autocast(device_type, torch.bfloat16)
    return nullcontext
