"""The oracle: the update rule of design.md, section 1, written down naively. Sequential, uncut, one worker at a time.

Nothing here comes from the package under test: plain modules, `loss.backward()`, optimizers from their definitions,
and every theta[t] kept in a list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class SGD:
    """g = grad + wd theta;  b = mu b + g (b = g at first);  theta' = theta - lr b."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.buffers: dict[str, Tensor] = {}

    def step(self, name: str, theta: Tensor, gradient: Tensor, factor: float) -> Tensor:
        g = gradient + self.weight_decay * theta
        b = self.momentum * self.buffers[name] + g if name in self.buffers else g
        self.buffers[name] = b
        return theta - self.lr * factor * b


class AdamW:
    """Decoupled weight decay, then Adam with bias correction."""

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor, int]] = {}

    def step(self, name: str, theta: Tensor, gradient: Tensor, factor: float) -> Tensor:
        lr, (b1, b2) = self.lr * factor, self.betas
        m, v, k = self.moments.get(name, (torch.zeros_like(theta), torch.zeros_like(theta), 0))
        m, v, k = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2, k + 1
        self.moments[name] = m, v, k
        m_hat, v_hat = m / (1 - b1**k), v / (1 - b2**k)
        return theta * (1 - lr * self.weight_decay) - lr * m_hat / (v_hat.sqrt() + self.eps)


def staleness(mode: str | Sequence[Sequence[int]], workers: int, stages: int, accumulate: int = 1) -> list[list[int]]:
    """Return d(i, j) for the M = kN micro-batches of a training step: design.md, section 1.

    For `cdp_v2` by the slots of the cyclic timeline, not by its formula: the newest version there is.
    """
    turns = workers * accumulate
    if mode == "dp":
        return [[0] * stages for _ in range(turns)]
    if mode == "cdp_v1":
        return [[1] * stages for _ in range(turns)]
    if mode == "cdp_v2":
        return [
            [_newest_lag(i, j, turns, 2 * (stages // workers), stages) for j in range(stages)] for i in range(turns)
        ]
    assert not isinstance(mode, str)
    return [list(row) for row in mode]


def _newest_lag(i: int, j: int, turns: int, delay: int, stages: int) -> int:
    """Return how old the newest version is when micro-batch i starts stage j, in a step far from the first."""
    step = 10
    slot = delay * (step * turns + i) + j
    version = step + 1
    while delay * (version * turns - 1) + 2 * stages - 1 - j >= slot:  # the slot of the last backward before it
        version -= 1
    return step - version


@dataclass
class Outcome:
    """What the rule gives: theta[0..T], the losses of every step, and the averaged buffers after every step."""

    thetas: list[dict[str, Tensor]]
    losses: list[list[float]]
    buffers: list[dict[str, Tensor]]


def train(
    stages: Sequence[nn.Module],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: SGD | AdamW,
    mode: str | Sequence[Sequence[int]],
    workers: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: Callable[[int], float] = lambda _: 1.0,
    accumulate: int = 1,
    replicas: int = 1,
) -> Outcome:
    """Run the rule over `batches`. Parameter `3.weight` belongs to stage 3.

    Micro-batch i of the M = kN of a step is of worker i mod N. With R replicas each is cut into R micro-batches of
    their own, which read the same; each replica of a worker keeps its own running statistics.
    """
    micro_batches, lanes = workers * accumulate * replicas, workers * replicas
    d = staleness(mode, workers, len(stages), accumulate)
    models = [nn.Sequential(*copy.deepcopy(list(stages))).train() for _ in range(lanes)]
    trainable = [name for name, parameter in models[0].named_parameters() if parameter.requires_grad]
    thetas = [{name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}]
    outcome = Outcome(thetas, [], [])
    for t, (inputs, targets) in enumerate(batches):
        size = len(inputs) // micro_batches
        losses, gradients = [], []
        for i in range(micro_batches):
            model = models[i % lanes]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    stage = int(name.split(".")[0])
                    parameter.copy_(thetas[max(0, t - d[i // replicas][stage])][name])
            model.zero_grad(set_to_none=True)
            rows = slice(i * size, (i + 1) * size)
            loss = loss_fn(model(inputs[rows]), targets[rows])
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        new = dict(thetas[t])
        for name in trainable:
            if all(gradient[name] is None for gradient in gradients):
                continue
            total = gradients[0][name]
            for gradient in gradients[1:]:
                total = total + gradient[name]
            new[name] = optimizer.step(name, thetas[t][name], total / micro_batches, factor(t))
        thetas.append(new)
        outcome.losses.append([sum(losses[i : i + replicas]) / replicas for i in range(0, micro_batches, replicas)])
        outcome.buffers.append(
            {
                name: torch.stack([dict(model.named_buffers())[name].double() for model in models]).mean(0)
                for name, _ in models[0].named_buffers()
            }
        )
    return outcome
