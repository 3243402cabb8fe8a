"""A stage trained by a library: how it runs for a worker, its update, and a model without memory to fill later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cdp_repro.engine.parameters import OptimizerFactory, load_optimizer, optimizer_bytes
from cdp_repro.engine.randomness import seeded


class WorkerStage(nn.Module):
    """Stage j, run for worker i in training step t: with their random numbers, in the autocast context."""

    def __init__(
        self,
        stage: nn.Module,
        number: int,
        seed: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self.stage = stage
        self.number = number
        self.step, self.worker = 0, 0
        self._seed = seed
        self._device = device
        self._autocast = autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the stage for one micro-batch, [micro-batch, ...]."""
        with seeded(self._device, self._seed, self.step, self.worker, self.number), self._autocast():
            output: Tensor = self.stage(inputs)
        return output


class StageOptimizer:
    """The optimizer of a rank's parameters of one stage, sharded or not."""

    def __init__(self, stage: nn.Module, optimizer: OptimizerFactory) -> None:
        self._parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups] if self._optimizer else []

    @property
    def class_name(self) -> str | None:
        """Name of the optimizer's class; None if nothing in the stage is trained."""
        return type(self._optimizer).__name__ if self._optimizer else None

    @property
    def bytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        return optimizer_bytes(self._optimizer)

    def update(self, learning_rate_factor: float) -> None:
        """Update the parameters in place by their gradients, then drop the gradients."""
        if self._optimizer is None:
            return
        for group, base_rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base_rate * learning_rate_factor
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return class and state, with whole tensors. Collective if the stage is sharded."""
        if self._optimizer is None:
            return {"class": None, "state": None}
        state = self._optimizer.state_dict()
        whole = {index: {key: on_cpu(value) for key, value in entry.items()} for index, entry in state["state"].items()}
        return {"class": self.class_name, "state": {**state, "state": whole}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state that `state_dict` has returned."""
        if self._optimizer is None:
            return
        mine = {
            index: {key: _copy_like(self._parameters[index], value) for key, value in entry.items()}
            for index, entry in state["state"]["state"].items()
        }
        load_optimizer(self._optimizer, {**state["state"], "state": mine})


def on_cpu(value: Any) -> Any:
    """Return a tensor as a whole copy on the CPU (collective if it is sharded), anything else as it is."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, [its rows, ...], or the whole if it is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def write(parameter: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter or buffer; a sharded one takes this rank's part."""
    with torch.no_grad():
        parameter.copy_(_copy_like(parameter, value))


def _copy_like(parameter: Tensor, value: Any) -> Any:
    """Return a copy of `value`, sharded as the parameter is if the shapes are equal, as they are for a momentum."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value.clone()
    whole = value.to(parameter.device)
    # src_data_rank=None: every rank has the whole tensor, nothing needs to be sent; clone: only the shard stays
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()


def skeleton(stages: Sequence[nn.Module]) -> nn.Sequential:
    """Return a copy of the model whose tensors have shapes and types but no memory; `fill` gives them values."""
    model = copy.deepcopy(nn.Sequential(*stages))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.new_empty(()).expand(tensor.shape)
    return model


def fill(bare: nn.Sequential, values: Sequence[dict[str, Tensor]], device: torch.device) -> nn.Sequential:
    """Return a copy of a skeleton with the values of its parameters and buffers, by stage and name, on `device`."""
    model = copy.deepcopy(bare)
    for stage, named in zip(model, values, strict=True):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            tensor.data = named[name].to(device)
    return model
