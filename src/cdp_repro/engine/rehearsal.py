"""One micro-batch walked through all stages, to learn their costs and what they hand to each other.

On fake tensors, which have a shape, a type and a storage but no data, nothing is computed and no memory is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cdp_repro.engine.compute import Gradients, LossFn, SavedForward, StageCompute, Version
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.engine.prefix import Prefix

Autocast = Callable[[], AbstractContextManager[object]]
Convert = Callable[[Tensor], Tensor]


@contextmanager
def fake_tensors() -> Iterator[Convert]:
    """Run the body without computing anything; yields what makes a fake tensor of a real one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.random.fork_rng(devices=[]):
        yield mode.from_tensor


class Rehearsal:
    """A micro-batch on its way through the stages, forward and then backward; `stages` are left as they are."""

    def __init__(
        self, stages: Sequence[nn.Module], loss_fn: LossFn, autocast: Autocast, convert: Convert = torch.clone
    ) -> None:
        last = len(stages) - 1
        self._compute = [
            StageCompute(stage, loss_fn if number == last else None, autocast) for number, stage in enumerate(stages)
        ]
        self._versions = [Version(0, _converted(dict(stage.named_parameters()), convert)) for stage in stages]
        self._buffers = [_converted(dict(stage.named_buffers()), convert) for stage in stages]
        self.stages = len(stages)
        self._saved: list[SavedForward] = []
        self._gradient: Tensor | None = None

    def begin(self, inputs: Tensor, targets: Tensor) -> None:
        """Start a micro-batch, [B/N, ...] each."""
        self.output, self._targets = inputs, targets

    def forward(self, stage: int, meter: ActivationMeter | None = None, prefix: Prefix | None = None) -> None:
        """Run the next stage forward; where sequences are cut, on the slice behind `prefix`."""
        self._input_storage = weakref.ref(self.output.untyped_storage())
        output, saved = self._compute[stage].forward(
            self._versions[stage], self._buffers[stage], self.output, self._targets, meter, prefix=prefix
        )
        self._saved.append(saved)
        if stage == len(self._compute) - 1:
            self._gradient = torch.ones_like(output)
            del self.output, self._targets
        else:
            self.output = output.requires_grad_(saved.edge is not None)

    def keeps_input(self) -> bool:
        """Whether the input of the stage that ran last is still alive, for its backward."""
        return self._input_storage() is not None

    def backward(self, later: Mapping[str, Tensor] | None = None) -> tuple[Tensor | None, Gradients]:
        """Run the latest stage backward; return the gradients of its input and of its parameters.

        `later` are the gradients of what its layers have kept for the slice after this one.
        """
        gradients: Gradients = {}
        compute = self._compute[len(self._saved) - 1]
        self._gradient = compute.backward(self._saved.pop(), self._gradient, gradients, later=later)
        return self._gradient, gradients


def _converted(tensors: Mapping[str, Tensor], convert: Convert) -> dict[str, Tensor]:
    return {name: convert(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
