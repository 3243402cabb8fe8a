"""Optimizers, and learning-rate schedules as pure functions of the training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cdp_repro.config.schema import OptimConfig
from cdp_repro.models.chain import hidden_matrices
from cdp_repro.schedule.branches import Sources
from cdp_repro.training.muon import muon_with_adamw


def optimizer_factory(
    config: OptimConfig, stages: Sequence[nn.Sequential], sources: Sources = ()
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function that makes the optimizer of one of the `stages` from its parameters."""
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    if config.name == "sgd":
        return lambda parameters: torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay, nesterov=config.nesterov
        )
    if config.name == "nadamw":
        return lambda parameters: torch.optim.NAdam(
            parameters, lr=config.lr, betas=betas, weight_decay=decay, decoupled_weight_decay=True
        )
    adamw: dict[str, Any] = {"lr": config.lr, "betas": betas, "weight_decay": decay}
    if config.name == "muon":
        # steps of the size of AdamW's, so that one learning rate suits both
        muon = {"lr": config.lr, "momentum": config.momentum, "weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
        hidden = hidden_matrices(stages, sources)
        return lambda parameters: muon_with_adamw(parameters, hidden, muon, adamw)
    if config.name == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, **adamw)
    raise ValueError(f"optim.name={config.name!r}: no optimizer is made for this name")


def learning_rate_factor(config: OptimConfig, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """Return step -> factor on the learning rate in the update that makes theta[step + 1].

    The warm-up grows linearly, and reaches 1 in the last step of `warmup_epochs`. After it, `step` is constant within
    an epoch; `cosine` begins at 1, falls from step to step and would reach 0 just after the last one.
    """
    warmup_steps = config.warmup_epochs * steps_per_epoch
    total_steps = steps_per_epoch * epochs

    def factor(step: int) -> float:
        if step + 1 <= warmup_steps:
            return (step + 1) / warmup_steps
        if config.schedule == "step":
            return float(config.gamma ** (step // steps_per_epoch // config.step_epochs))
        if config.schedule == "cosine":
            progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return 1.0

    return factor
