"""Methods against delay: they change the step of the optimizer, or the parameters that a forward reads.

Update t makes theta[t+1] from theta[t]; u_t is the optimizer's step, theta[t] - theta[t+1] if nothing corrects it. A
micro-batch of training step t that reads theta[t-s] is s steps stale. All methods know the past only through the last
steps, kept in the optimizer's own state, beside momentum, so that checkpoints and placements need no code for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

_KEY = "last_step_"
"""Prefix of keys in the optimizer's state: `last_step_1` is the newest step, `last_step_2` the one before."""


class Uncorrected:
    """Leaves stale reads as they are (`delay=none`), and is the interface of all methods: one object for each stage."""

    name: ClassVar[str] = "none"
    reads_ahead: ClassVar[bool] = False
    """Whether stale reads see parameters moved on by the last step of their version (see `Version.read_in`)."""
    kept_steps = 0
    """Last steps that the stage keeps, each as large as its trainable parameters."""

    def __init__(self, staleness: Sequence[int]) -> None:
        """`staleness` has one entry for each micro-batch of a training step, for this stage."""
        self._staleness = staleness

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer make its step; reads the gradients from `.grad` and leaves them there unchanged."""
        if not self.kept_steps:
            optimizer.step()
            return
        with torch.no_grad():
            before = [(parameter, parameter.clone(), parameter.grad) for parameter in _moving(optimizer)]
            for parameter, _, gradient in before:
                if gradient is not None:
                    parameter.grad = self._gradient(gradient, last_steps(optimizer, parameter))
            optimizer.step()
            for parameter, theta, gradient in before:
                parameter.grad = gradient
                step = theta.sub_(parameter)
                self._correct(parameter, step, last_steps(optimizer, parameter))
                self._remember(optimizer, parameter, step)

    def _gradient(self, gradient: Tensor, past: Sequence[Tensor]) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return what the optimizer gets in place of the gradient; `past` are the last steps, newest first."""
        return gradient

    def _correct(self, parameter: nn.Parameter, step: Tensor, past: Sequence[Tensor]) -> None:
        """Change the parameter after the optimizer's `step`."""

    def _remember(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, step: Tensor) -> None:
        """Keep the newest step without overwriting older ones, because versions refer to the steps that made them."""
        steps = [step, *last_steps(optimizer, parameter)][: self.kept_steps]
        optimizer.state[parameter].update({f"{_KEY}{age}": kept for age, kept in enumerate(steps, start=1)})


DelayFactory = Callable[[Sequence[int]], Uncorrected]
"""Makes the method of a stage from the staleness of its micro-batches: one of the classes here."""


class ErrorFeedback(Uncorrected):
    """theta[t+1] = theta[t] - (u_t + a (u_t - u_{t-1})), with no step before the first: u_{-1} = 0.

    The corrections telescope: the parameters are those of the plain steps, moved on by a times the last step.
    Source: "One-Step Gradient Delay is Not a Barrier", arXiv 2606.30634, for a delay of one step everywhere (a = 1).
    """

    name = "error_feedback"

    def __init__(self, staleness: Sequence[int], strength: float | None = None) -> None:
        """`strength` is a. By default it is the share of the stage's reads that are stale: (ceil((S-j)/c)-1)/M for
        `cdp_v2` with S = cN, 1 for `cdp_v1`, 0 for `dp`."""
        super().__init__(staleness)
        self._strength = _share(staleness, 1) if strength is None else _checked(strength)
        self.kept_steps = int(self._strength != 0)

    def _correct(self, parameter: nn.Parameter, step: Tensor, past: Sequence[Tensor]) -> None:
        change = step - past[0] if past else step
        parameter.sub_(change, alpha=self._strength)


class Prediction(Uncorrected):
    """A read that is s steps stale sees theta[v] - s u_{v-1}, as if the next s steps were like the last.

    u_{v-1} is the step of the optimizer in use: the learning rate times the momentum with SGD, or times Adam's
    direction with Adam. Forward and backward see the same values. The optimizer's own parameters stay as they are.
    Sources: SpecTrain, arXiv 1809.02839 (momentum); XPipe, arXiv 1911.04610 (Adam).
    """

    name = "prediction"
    reads_ahead = True

    def __init__(self, staleness: Sequence[int]) -> None:
        super().__init__(staleness)
        oldest = max(staleness)
        self.kept_steps = oldest + 1 if oldest else 0  # one for each version that a later micro-batch reads


class Compensation(Uncorrected):
    """The optimizer gets g + lambda g g (theta[t] - theta_read), elementwise.

    g is the mean gradient of the training step; theta_read is the mean of the versions that its micro-batches read. In
    the source, each worker's gradient is its own update. Source: DC-ASGD, arXiv 1609.08326.
    """

    name = "compensation"

    def __init__(self, staleness: Sequence[int], strength: float = 1.0) -> None:
        """`strength` is lambda; 1 uses g g as the diagonal of the Hessian."""
        super().__init__(staleness)
        self._strength = _checked(strength)
        self.kept_steps = max(staleness) if strength else 0

    def _gradient(self, gradient: Tensor, past: Sequence[Tensor]) -> Tensor:
        if not past:
            return gradient
        # theta[t-s] - theta[t] is the sum of the last s steps: each step counts for the reads that missed it
        lag = torch.zeros_like(gradient)
        for age, step in enumerate(past, start=1):
            lag.add_(step, alpha=_share(self._staleness, age))
        return torch.addcmul(gradient, gradient.square(), lag, value=-self._strength)


DELAYS: dict[str, Callable[..., Uncorrected]] = {
    method.name: method for method in (Uncorrected, ErrorFeedback, Prediction, Compensation)
}
"""The methods by name."""


def last_steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """Return the last steps kept of a parameter, newest first, each of its shape."""
    entry, found = optimizer.state.get(parameter, {}), list[Tensor]()
    while (key := f"{_KEY}{len(found) + 1}") in entry:
        found.append(entry[key])
    return found


def delay_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of all last steps in an optimizer's state."""
    entries = optimizer.state.values() if optimizer else ()
    return sum(value.nbytes for entry in entries for key, value in entry.items() if str(key).startswith(_KEY))


def _moving(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that have or had a gradient. The others must keep an empty state, by which Adam recognises a
    first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or last_steps(optimizer, parameter):
                yield parameter


def _checked(strength: float) -> float:
    if not isinstance(strength, (int, float)) or not 0 <= strength < math.inf:
        raise ValueError(f"strength={strength!r}: use a finite number, 0 or more, such as strength=1.0")
    return strength


def _share(staleness: Sequence[int], age: int) -> float:
    """Return the share of reads that are at least `age` steps stale."""
    return sum(each >= age for each in staleness) / len(staleness)
