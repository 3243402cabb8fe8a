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
    """g = grad + wd theta;  b = mu b + g (b = g at first);  theta' = theta - lr b, or with Nesterov - lr (g + mu b)."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> None:
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.buffers: dict[str, Tensor] = {}

    def step(self, name: str, theta: Tensor, gradient: Tensor, factor: float) -> Tensor:
        g = gradient + self.weight_decay * theta
        b = self.momentum * self.buffers[name] + g if name in self.buffers else g
        self.buffers[name] = b
        return theta - self.lr * factor * (g + self.momentum * b if self.nesterov else b)


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


class NAdamW:
    """Dozat, "Incorporating Nesterov Momentum into Adam", with the momentum schedule of torch and decoupled decay."""

    def __init__(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor, int, float]] = {}

    def _mu(self, k: int) -> float:
        return self.betas[0] * (1 - 0.5 * 0.96 ** (0.004 * k))

    def step(self, name: str, theta: Tensor, gradient: Tensor, factor: float) -> Tensor:
        lr, (b1, b2) = self.lr * factor, self.betas
        m, v, k, product = self.moments.get(name, (torch.zeros_like(theta), torch.zeros_like(theta), 0, 1.0))
        m, v, k = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2, k + 1
        mu, following = self._mu(k), self._mu(k + 1)
        product = torch.tensor(product, dtype=torch.float32).mul_(mu).item()  # torch keeps it in single precision
        self.moments[name] = m, v, k, product
        direction = (1 - mu) / (1 - product) * gradient + following / (1 - product * following) * m
        return theta * (1 - lr * self.weight_decay) - lr * direction / ((v / (1 - b2**k)).sqrt() + 1e-8)


class Muon:
    """Orthogonalised momentum of the parameters in `hidden`, flattened to matrices; `rest` steps all others."""

    def __init__(self, lr: float, momentum: float, weight_decay: float, hidden: set[str], rest: AdamW) -> None:
        self.lr, self.momentum, self.weight_decay, self.hidden, self.rest = lr, momentum, weight_decay, hidden, rest
        self.buffers: dict[str, Tensor] = {}

    def step(self, name: str, theta: Tensor, gradient: Tensor, factor: float) -> Tensor:
        if name not in self.hidden:
            return self.rest.step(name, theta, gradient, factor)
        lr, mu = self.lr * factor, self.momentum
        b = mu * self.buffers.get(name, torch.zeros_like(theta)) + (1 - mu) * gradient
        self.buffers[name] = b
        matrix = ((1 - mu) * gradient + mu * b).flatten(1)
        size = 0.2 * max(matrix.shape) ** 0.5
        return theta * (1 - lr * self.weight_decay) - lr * size * self._orthogonal(matrix).view_as(theta)

    @staticmethod
    def _orthogonal(matrix: Tensor) -> Tensor:
        """Five Newton-Schulz iterations with Jordan's coefficients, in bfloat16 as torch does."""
        x = matrix.bfloat16()
        x = x if x.shape[0] <= x.shape[1] else x.T
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix)


class NoDelay:
    """What makes up for stale reads: nothing. Others see the whole history: every theta[t] by name."""

    def read(self, thetas: Sequence[dict[str, Tensor]], step: int, version: int, name: str) -> Tensor:
        """Return what a micro-batch of `step` that reads `version` computes with."""
        return thetas[version][name]

    def gradient(self, thetas: Sequence[dict[str, Tensor]], read: Sequence[int], name: str, g: Tensor) -> Tensor:
        """Return what the optimizer is given; `read` are the versions that the micro-batches of the step have read."""
        return g

    def update(self, theta: Tensor, after: Tensor, stale: float, name: str) -> Tensor:
        """Return theta[t+1], of which the optimizer would make `after`; `stale` is the share of stale reads."""
        return after


class ErrorFeedback(NoDelay):
    def __init__(self, strength: float | None = None) -> None:
        self.strength, self.last = strength, {}

    def update(self, theta: Tensor, after: Tensor, stale: float, name: str) -> Tensor:
        u = theta - after
        change = u - self.last.get(name, torch.zeros_like(u))
        self.last[name] = u
        return theta - (u + (stale if self.strength is None else self.strength) * change)


class Prediction(NoDelay):
    def read(self, thetas: Sequence[dict[str, Tensor]], step: int, version: int, name: str) -> Tensor:
        if version == 0:
            return thetas[0][name]
        return thetas[version][name] + (step - version) * (thetas[version][name] - thetas[version - 1][name])


class Compensation(NoDelay):
    def __init__(self, strength: float) -> None:
        self.strength = strength

    def gradient(self, thetas: Sequence[dict[str, Tensor]], read: Sequence[int], name: str, g: Tensor) -> Tensor:
        mean = torch.stack([thetas[version][name] for version in read]).mean(0)
        return g + self.strength * g * g * (thetas[-1][name] - mean)


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
    optimizer: SGD | AdamW | NAdamW | Muon,
    mode: str | Sequence[Sequence[int]],
    workers: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: Callable[[int], float] = lambda _: 1.0,
    accumulate: int = 1,
    replicas: int = 1,
    delay: NoDelay | None = None,
    clip: tuple[float, bool] | None = None,
    model_of: Callable[..., nn.Module] = nn.Sequential,
) -> Outcome:
    """Run the rule over `batches`. Parameter `3.weight` belongs to stage 3.

    Micro-batch i of the M = kN of a step is of worker i mod N. With R replicas each is cut into R micro-batches of
    their own, which read the same; each replica of a worker keeps its own running statistics. `clip` is the largest
    norm of the mean gradient, and whether it is that of all stages together. `model_of` joins the stages.
    """
    micro_batches, lanes = workers * accumulate * replicas, workers * replicas
    d, delay = staleness(mode, workers, len(stages), accumulate), delay or NoDelay()
    models = [model_of(*copy.deepcopy(list(stages))).train() for _ in range(lanes)]
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
                    parameter.copy_(delay.read(thetas, t, max(0, t - d[i // replicas][stage]), name))
            model.zero_grad(set_to_none=True)
            rows = slice(i * size, (i + 1) * size)
            loss = loss_fn(model(inputs[rows]), targets[rows])
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        new, means = dict(thetas[t]), {}
        for name in trainable:
            if all(gradient[name] is None for gradient in gradients):
                continue
            total = gradients[0][name]
            for gradient in gradients[1:]:
                total = total + gradient[name]
            means[name] = total / micro_batches
        for name, mean in means.items():
            lags = [row[int(name.split(".")[0])] for row in d]
            g = mean * clip_factor(means, name, *clip) if clip else mean
            g = delay.gradient(thetas, [max(0, t - lag) for lag in lags], name, g)
            after = optimizer.step(name, thetas[t][name], g, factor(t))
            new[name] = delay.update(thetas[t][name], after, sum(lag > 0 for lag in lags) / len(lags), name)
        thetas.append(new)
        outcome.losses.append([sum(losses[i : i + replicas]) / replicas for i in range(0, micro_batches, replicas)])
        outcome.buffers.append(
            {
                name: torch.stack([dict(model.named_buffers())[name].double() for model in models]).mean(0)
                for name, _ in models[0].named_buffers()
            }
        )
    return outcome


def clip_factor(gradients: dict[str, Tensor], name: str, limit: float, is_global: bool) -> float:
    """Return what a gradient is multiplied by: limit / norm, at most 1, with the norm over all stages or its own."""
    of = [g for other, g in gradients.items() if is_global or other.split(".")[0] == name.split(".")[0]]
    norm = sum(g.square().sum() for g in of) ** 0.5
    return min(1.0, limit / (norm.item() + 1e-6))
