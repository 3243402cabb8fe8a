"""Walks one micro-batch through all stages, to find their costs and the values that they pass to each other.

With fake tensors, which have a shape, a type and a storage but no data, nothing is computed and no memory is used.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from cdp_repro.engine.compute import Gradients, Network, SavedForward, Version
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.engine.prefix import Prefix
from cdp_repro.schedule.branches import chain

Convert = Callable[[Tensor], Tensor]


@contextmanager
def fake_tensors() -> Iterator[Convert]:
    """Run the body without computing anything; yields a function that makes a fake tensor from one with a shape.

    A tensor on the meta device, as of a model without weights, becomes one of the CPU, as the data are.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return mode.from_tensor(tensor)

    log = logging.getLogger(FakeTensorMode.__module__)  # it prints the traceback of an error that it raises anyway
    was_disabled, log.disabled = log.disabled, True
    try:
        with mode, torch.random.fork_rng(devices=[]):
            yield converted
    finally:
        log.disabled = was_disabled


class Rehearsal:
    """A micro-batch on its way through the stages, forward and then backward; the network is left as it is."""

    def __init__(self, network: Network, convert: Convert = torch.clone) -> None:
        """`convert` makes the tensors to compute with from those of the network."""
        self.stages = stages = _copies(network.stages)
        self.sources = network.sources or chain(len(stages))
        """For each stage, the stages whose outputs it reads."""
        self._compute = replace(network, stages=stages).compute()
        self._versions = [Version(0, _converted(dict(stage.named_parameters()), convert)) for stage in stages]
        self._buffers = [_converted(dict(stage.named_buffers()), convert) for stage in stages]
        self._saved: list[SavedForward] = []
        self._gradients: dict[int, Tensor | None] = {}
        """By stage: the gradient of its output, until its backward."""
        self.outputs: dict[int, Tensor] = {}
        """By stage: its output, until another stage reads it."""

    def begin(self, inputs: Tensor, targets: Any) -> None:
        """Start a micro-batch: inputs [B/M, ...], and what the loss takes."""
        self._targets = targets
        first = [stage for stage, read in enumerate(self.sources) if not read]
        self._data = {stage: inputs if stage == first[-1] else inputs.clone() for stage in first}

    def forward(self, stage: int, meter: ActivationMeter | None = None, prefix: Prefix | None = None) -> Tensor:
        """Run the forward of `stage`, on the slice after `prefix` if there is one.

        The result is its output, [B/M, ...], or the loss, [].

        Raises:
            ValueError: tensors are fake, and the stage, the loss or a hook needs a value.
        """
        inputs = [self.outputs.pop(each) for each in self.sources[stage]] or [self._data.pop(stage)]
        self._input_storages = [weakref.ref(each.untyped_storage()) for each in inputs]
        try:
            output, saved = self._compute[stage].forward(
                self._versions[stage], self._buffers[stage], inputs, self._targets, meter, prefix=prefix
            )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"part {stage} of {len(self.stages)} ({type(self.stages[stage]).__name__}) reads a value of a tensor, "
                "itself, in a hook or in loss_fn, as .item(), `if` and x[mask] do; it runs once without values, to "
                "know costs and the shapes of messages: use torch.where, and log values outside the model"
            ) from error
        self._saved.append(saved)
        if stage == len(self._compute) - 1:
            self._gradients[stage] = torch.ones_like(output)
            del self._targets
        else:
            self.outputs[stage] = output.requires_grad_(saved.edge is not None)
        return output

    def keeps_inputs(self) -> list[bool]:
        """Return, for each input of the stage that ran last, whether its storage is still alive for the backward."""
        return [storage() is not None for storage in self._input_storages]

    def backward(self, later: Mapping[str, Tensor] | None = None) -> tuple[Tensor | None, Gradients]:
        """Run the backward of the last stage still to do; return the gradients of its output, if any, and parameters.

        `later` are the gradients of what its layers have kept for the next slice.
        """
        gradients: Gradients = {}
        stage = len(self._saved) - 1
        of_output = self._gradients.pop(stage)
        of_inputs = self._compute[stage].backward(self._saved.pop(), of_output, gradients, later=later)
        self._gradients.update(zip(self.sources[stage], of_inputs, strict=False))  # data takes none
        return of_output, gradients


def _copies(stages: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Return copies of the stages that share their tensors.

    A forward may keep what it makes, such as a table of positions: a fake tensor must not stay in the stage itself.
    Stages that hold something that cannot be copied, such as a lock, are returned themselves.
    """
    kept = {
        id(tensor): tensor
        for stage in stages
        for part in stage.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        if isinstance(tensor, Tensor)
    }
    try:
        return copy.deepcopy([*stages], kept)
    except Exception:  # whatever the code of a stage raises
        return stages


def _converted(tensors: Mapping[str, Tensor], convert: Convert) -> dict[str, Tensor]:
    return {name: convert(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
