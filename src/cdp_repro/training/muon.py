"""torch's Muon for the matrices inside a network, convolution filters among them, and AdamW for the rest.

Source: https://kellerjordan.github.io/posts/muon: first layer, head, biases and gains are left to AdamW, and a filter
is flattened to the matrix [outputs, inputs x height x width].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def muon_with_adamw(
    parameters: Sequence[nn.Parameter], hidden: Collection[nn.Parameter], muon: dict[str, Any], adamw: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return one optimizer for the parameters of a stage: Muon for those in `hidden`, AdamW for others.

    `muon` and `adamw` are the settings of each. Either may have nothing to do.
    """
    inside = [parameter for parameter in parameters if parameter in hidden]
    rest = [parameter for parameter in parameters if parameter not in hidden]
    parts: list[torch.optim.Optimizer] = []
    if inside:
        parts.append(FilterMuon(inside, **muon))
    if rest:
        parts.append(torch.optim.AdamW(rest, **adamw))
    return Joined(parts)


class FilterMuon(torch.optim.Muon):
    """torch's Muon, which takes only matrices, extended to filters [outputs, inputs, height, width]."""

    def __init__(self, params: Sequence[nn.Parameter], **settings: Any) -> None:
        with _as_matrices(params, {}):
            super().__init__(params, **settings)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step; afterwards, state and parameters have the shapes of the filters again."""
        with _as_matrices([p for group in self.param_groups for p in group["params"]], self.state):
            loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
        return loss


@contextmanager
def _as_matrices(parameters: Sequence[nn.Parameter], state: Mapping[Tensor, Any]) -> Iterator[None]:
    """Within the body, flatten all dimensions but the first of parameters, gradients and optimizer state."""
    before = [(parameter, parameter.data, parameter.grad) for parameter in parameters if parameter.ndim > 2]
    for parameter, whole, gradient in before:
        parameter.grad = None  # it must have the shape of the parameter
        parameter.data = whole.flatten(1)
        parameter.grad = None if gradient is None else gradient.flatten(1)
        _reshape(state.get(parameter, {}), whole.shape, (len(whole), -1))
    try:
        yield
    finally:
        for parameter, whole, gradient in before:
            flat = parameter.data
            parameter.grad = None
            if flat.data_ptr() != whole.data_ptr():  # with channels_last, flattening has copied
                whole.copy_(flat.view(whole.shape))
            parameter.data = whole
            parameter.grad = gradient
            _reshape(state.get(parameter, {}), flat.shape, whole.shape)


def _reshape(kept: dict[str, Any], found: Sequence[int], wanted: Sequence[int]) -> None:
    for key, value in kept.items():
        if isinstance(value, Tensor) and tuple(value.shape) == tuple(found):
            kept[key] = value.reshape(wanted)


class Joined(torch.optim.Optimizer):
    """Several optimizers as one, each with its own parameters; they share its groups and its state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{**group} for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:  # also called by `load_state_dict`
        super().__setstate__(state)
        self._link()

    def _link(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step with each."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self._parts:
            part.step()
        return loss
