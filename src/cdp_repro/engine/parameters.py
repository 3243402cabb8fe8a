"""The state of one stage: parameter versions, optimizer, gradient sums; and every worker's buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdp_repro.engine.compute import Gradients, Version
from cdp_repro.engine.layouts import TensorLayout

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class StageState:
    """Versions are out of place: an update writes new tensors, and an old version lives as long as it is kept.

    Only where nobody reads the old version any more does an update write into its tensors. Those of the current version
    are shared with the parameters that it was made from, which are therefore always up to date.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: OptimizerFactory) -> None:
        self._parameters = dict(parameters)
        trainable = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        self._optimizer = optimizer(trainable) if trainable else None
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups] if self._optimizer else []
        self._gradient_sum: Gradients = {}
        self._totals: dict[int, Gradients] = {}
        self._versions: dict[int, Version] = {}
        self._spares_gradients: bool | None = None
        """Whether the optimizer leaves gradients as they are; None until it has been seen."""
        self.current = 0
        self._publish(0)

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that are alive, oldest first."""
        return sorted(self._versions)

    @property
    def version_bytes(self) -> int:
        """Bytes of one version of the stage's parameters."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer keeps for the stage's parameters, such as momentum."""
        return optimizer_bytes(self._optimizer)

    def read(self, number: int) -> Version:
        """Return a version that is alive."""
        return self._versions[number]

    def free(self, number: int) -> None:
        """Forget a version; its tensors die with the last graph that uses them."""
        del self._versions[number]

    @property
    def gradient_sum(self) -> Gradients:
        """The sum of this training step so far, by name, for a backward to add to in place."""
        return self._gradient_sum

    def add_gradients(self, gradients: Gradients) -> None:
        """Add one worker's gradients, or the sum of earlier ones, to the sum of this step; they become ours."""
        for name, gradient in gradients.items():
            present = self._gradient_sum.get(name)
            self._gradient_sum[name] = gradient if present is None else present.add_(gradient)

    def take_sum(self) -> Gradients:
        """Return the sum of this training step so far, and start a new one."""
        taken, self._gradient_sum = self._gradient_sum, {}
        return taken

    def close_sum(self, version: int) -> None:
        """Make the sum so far the total from which `version` is made."""
        self.keep_total(version, self.take_sum())

    def keep_total(self, version: int, gradients: Gradients) -> None:
        """Keep the gradient sum from which `version` is made."""
        self._totals[version] = gradients

    def total(self, version: int) -> Gradients | None:
        """Return the gradient sum from which `version` is made, if it is here."""
        return self._totals.get(version)

    def free_total(self, version: int) -> None:
        """Forget the gradient sum from which `version` was made."""
        del self._totals[version]

    def update(self, learning_rate_factor: float, keep_total: bool = False, is_last_use: bool = False) -> None:
        """Make the next version from the current one and its total.

        `keep_total`: other ranks will ask for the total, so it stays. `is_last_use`: nobody reads the current version
        any more, so that its tensors become the next.
        """
        total = self._totals[self.current + 1]
        if not keep_total:
            del self._totals[self.current + 1]
        copies = keep_total and not self._spares_gradients
        for name, parameter in self._parameters.items():
            gradient = total.get(name)
            parameter.grad = gradient.clone() if copies and gradient is not None else gradient
            if not is_last_use:
                parameter.data = parameter.data.clone()  # the optimizer writes here; the old version stays as it is
        if self._optimizer is not None:
            for group, base_rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base_rate * learning_rate_factor
            before = self._gradient_counters()
            self._optimizer.step()
            if keep_total:
                self._note_gradients(spared=before == self._gradient_counters())
            self._optimizer.zero_grad()
        self.current += 1
        self._publish(self.current)

    def _gradient_counters(self) -> list[int]:
        """Return autograd's counters of how often each gradient was written to."""
        return [p.grad._version for p in self._parameters.values() if p.grad is not None]

    def _note_gradients(self, spared: bool) -> None:
        """Learn from the first update, which had a copy, whether the optimizer needs one."""
        if self._spares_gradients is None:
            self._spares_gradients = spared
        elif self._spares_gradients and not spared:
            raise RuntimeError(
                f"{self._optimizer_class} has written into a gradient that other ranks still need, after it had not in "
                "its first step: use an optimizer that leaves gradients as they are"
            )

    def _publish(self, number: int) -> None:
        # `.data`, not `.detach()`: a version counter of its own, so that autograd sees that a version never changes
        self._versions[number] = Version(
            number,
            {
                name: parameter.data.requires_grad_(parameter.requires_grad)
                for name, parameter in self._parameters.items()
            },
        )

    @property
    def optimized(self) -> list[str]:
        """Names of the optimizer's parameters, in its order."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        groups = self._optimizer.param_groups if self._optimizer else []
        return [names[parameter] for group in groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return versions and optimizer state, named by version and parameter."""
        return {
            "versions": {
                number: {name: tensor.detach() for name, tensor in version.tensors.items()}
                for number, version in self._versions.items()
            },
            "optimizer": {"class": self._optimizer_class, "state": self._optimizer and self._optimizer.state_dict()},
        }

    def check_state(self, state: dict[str, Any], needed_versions: set[int]) -> None:
        """Raise ValueError if `load_state_dict` could not take this state over."""
        if set(state["versions"]) != needed_versions:
            raise ValueError(
                f"the checkpoint has the versions {sorted(state['versions'])}, this mode needs "
                f"{sorted(needed_versions)}: it was written in another mode"
            )
        if state["optimizer"]["class"] != self._optimizer_class:
            raise ValueError(
                f"the checkpoint is of the optimizer {state['optimizer']['class']}, "
                f"this engine has {self._optimizer_class}"
            )
        for tensors in state["versions"].values():
            check_same_tensors(self._parameters, tensors)

    def load_state_dict(self, state: dict[str, Any], versions: Iterable[int]) -> None:
        """Take over a copy of what `state_dict` returned and `check_state` accepts, in the given versions of it."""
        self._versions.clear()
        for number in versions:
            for name, parameter in self._parameters.items():
                parameter.data = state["versions"][number][name].detach().to(parameter, copy=True)
            self._publish(number)
            self.current = number
        if self._optimizer is not None:
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]["state"]))

    @property
    def _optimizer_class(self) -> str | None:
        return type(self._optimizer).__name__ if self._optimizer else None


class WorkerBuffers:
    """The buffers of one stage, each worker's own (BatchNorm's running statistics)."""

    def __init__(self, module: nn.Module, workers: int) -> None:
        buffers = dict(module.named_buffers())
        self.of: list[dict[str, Tensor]] = [
            {name: buffer.detach().clone() for name, buffer in buffers.items()} for _ in range(workers)
        ]
        """By worker: the tensors by name."""

    def average(self) -> dict[str, Tensor]:
        """Return the mean over workers of the floating-point buffers; others from worker 0."""
        return {
            name: torch.stack([buffers[name] for buffers in self.of]).mean(0) if first.is_floating_point() else first
            for name, first in self.of[0].items()
        }

    def check_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise ValueError if `load_state` could not take this state over."""
        if len(state) != len(self.of):
            raise ValueError(f"the checkpoint is of {len(state)} workers, this engine has {len(self.of)}")
        for mine, theirs in zip(self.of, state, strict=True):
            check_same_tensors(mine, theirs)

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over a copy of every worker's buffers."""
        for mine, theirs in zip(self.of, state, strict=True):
            mine.update((name, theirs[name].to(buffer, copy=True)) for name, buffer in mine.items())


def check_same_tensors(mine: Mapping[str, Tensor | TensorLayout], loaded: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the names or shapes of two sets of tensors differ."""
    expected = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    found = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    if expected != found:
        differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        shown = ", ".join(f"{name}: {found.get(name)} for {expected.get(name)}" for name in differing[:3])
        raise ValueError(f"the checkpoint is of another model: {len(differing)} tensors differ, e.g. {shown}")


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of what an optimizer keeps for each value of its parameters; of shards, those on this rank."""
    if optimizer is None:
        return 0
    kept = (
        value.to_local() if hasattr(value, "to_local") else value
        for parameter, entry in optimizer.state.items()
        for value in entry.values()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )
    return sum(value.nbytes for value in kept)
