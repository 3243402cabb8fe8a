"""Refuses common code around a training loop that would do nothing here, and names the way that works.

A forward does not read a parameter of the stage, but a version of it. Several training steps are under way at once, and
`parameter.grad` never has a gradient of any of them between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_OPTIMIZER = (
    "the optimizer sees it: inside its step(), or in a hook set by optimizer.register_step_pre_hook, parameter.grad is "
    "the mean over the training step's micro-batches, for the parameters of one stage"
)


class Seal:
    """Some parameters that only the engine may change.

    `close` records their state, and `check` compares it with the current one. While the seal is closed, any use of
    `parameter.grad` raises RuntimeError.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise ValueError if one of the parameters has a hook."""
        self._parameters = dict(parameters)
        self._refuse_hooks()
        self.open()

    def close(self) -> None:
        """Record the current parameters as the engine's, and block `parameter.grad`."""
        self._record(is_blocked=True)

    def open(self) -> None:
        """Record the current parameters as the engine's, and let other code use `parameter.grad`."""
        self._record(is_blocked=False)

    def _record(self, is_blocked: bool) -> None:
        for p in self._parameters.values():
            p.grad = _no_gradient(p.shape, p.dtype, p.device) if is_blocked and p.requires_grad else None
        self._marks = [_mark_of(parameter) for parameter in self._parameters.values()]

    def check(self) -> None:
        """Raise ValueError if a parameter was changed since the last record, or has a hook."""
        self._refuse_hooks()
        for (name, parameter), mark in zip(self._parameters.items(), self._marks, strict=True):
            if _mark_of(parameter) != mark:
                raise ValueError(
                    f"the parameter {name} {tuple(parameter.shape)} was changed outside the engine, which keeps "
                    "several versions of it: change them all in the dict that engine.state_dict() returns, and give it "
                    "to engine.load_state_dict(); or change the stage before it is given to Engine(). If it is a view "
                    "of what another stage has a view of, too, give it memory of its own: nn.Parameter(view.clone())"
                )

    def _refuse_hooks(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"the parameter {name} {tuple(parameter.shape)} has a hook, which would never run: gradients go to "
                    f"the version that the forward has read. Remove the hook; {_OPTIMIZER}"
                )


class StageSeal:
    """The make-up of a stage and its buffers, which must not change between runs: a run has sets of buffers of its own,
    and the optimizer the parameters of when it was made."""

    def __init__(self, number: int, stage: nn.Module) -> None:
        """`number` is that of the stage, for messages."""
        self._number, self._stage = number, stage
        self._parameters = self._parameters_now()
        self.record()

    def record(self) -> None:
        """Record the current buffers as the engine's."""
        self._buffers = self._buffers_now()

    def check(self) -> None:
        """Raise ValueError if a part of the stage was replaced, added, frozen or unfrozen, or a buffer changed."""
        if others := sorted(differing(self._parameters, self._parameters_now())):
            raise ValueError(
                f"parameters of stage {self._number}, such as {others[0]}, were replaced, added, removed, frozen or "
                "unfrozen after the engine was made, which its optimizer does not know: change stages before they are "
                "given to Engine(), or make a new engine with them"
            )
        if changed := differing(self._buffers, self._buffers_now()):
            raise ValueError(
                f"the buffer {changed[0]} of stage {self._number} was changed outside the engine, which keeps sets of "
                'its own: change all sets, state["stages"][number]["buffers"], in the dict that engine.state_dict() '
                "returns, and give it to engine.load_state_dict(); or change it before the stage is given to Engine()"
            )

    def _parameters_now(self) -> dict[str, tuple[int, bool]]:
        return {name: (id(each), each.requires_grad) for name, each in self._stage.named_parameters()}

    def _buffers_now(self) -> dict[str, tuple[int, int]]:
        return {name: _mark_of(buffer) for name, buffer in self._stage.named_buffers()}


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names that do not stand for the same in both, or stand in one only."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _mark_of(tensor: Tensor) -> tuple[int, int]:
    """Return a mark that changes when a tensor is written to or gets other data."""
    return tensor._version, tensor.data_ptr()


class _NoGradient(Tensor):
    """Stands in `parameter.grad`; any use of it raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "the gradient of a stage's parameter is asked for, e.g. by clip_grad_norm_, an optimizer or a gradient "
            f"scaler in the loop over engine.run(): between two results there is none. Only {_OPTIMIZER}"
        )


@lru_cache
def _no_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a `_NoGradient` of the shape that `parameter.grad` must have; it uses no memory for it."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(_NoGradient)
