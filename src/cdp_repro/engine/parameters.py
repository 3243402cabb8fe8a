"""The state of one stage: parameters and optimizer; and helpers for sets of buffers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from cdp_repro.engine.compute import Gradients, Version
from cdp_repro.engine.delay import Uncorrected, delay_bytes, last_steps
from cdp_repro.engine.seal import Seal, differing

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_FACTORY = "each stage has one of its own, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"


class StageState:
    """The optimizer of one stage, and the parameters that it writes to.

    Versions are out of place: an update writes new tensors, and an old version lives as long as it is kept. An update
    only writes into the tensors of the old version if nothing reads that version any more. The newest version shares
    its tensors with the module's parameters, which are therefore always up to date.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerFactory,
        delay: Uncorrected | None = None,
    ) -> None:
        """`delay` is the method against delay of the stage."""
        self._parameters = dict(parameters)
        trainable = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        self._optimizer = _made(optimizer, trainable) if trainable else None
        self._base_rates = [group["lr"] for group in self._groups]
        self._rates = self._rates_now()
        self._refuse_other_rates()
        self.seal = Seal(self._parameters)
        self._delay = delay or Uncorrected([0])

    @property
    def version_bytes(self) -> int:
        """Bytes of one version of the stage's parameters."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer keeps for the stage's parameters, such as momentum."""
        return optimizer_bytes(self._optimizer) - self.delay_bytes

    @property
    def delay_bytes(self) -> int:
        """Bytes of the last steps that the method against delay keeps."""
        return delay_bytes(self._optimizer)

    def newest(self, number: int, age: int = 0) -> Version:
        """Return the current parameters as version `number`; `age`: how many steps the optimizer's state is ahead."""
        # `.data`, not `.detach()`: it has its own version counter, so that autograd sees no change of a version
        return Version(
            number,
            {
                name: parameter.data.requires_grad_(parameter.requires_grad)
                for name, parameter in self._parameters.items()
            },
            self._step_before(age),
        )

    def _step_before(self, age: int) -> dict[str, Tensor]:
        """Return, by name, the step that made the version of `age` updates ago; empty unless stale reads read ahead."""
        if not self._delay.reads_ahead or self._optimizer is None:
            return {}
        steps = {name: last_steps(self._optimizer, parameter) for name, parameter in self._parameters.items()}
        return {name: found[age] for name, found in steps.items() if age < len(found)}

    def update(
        self,
        version: Version,
        gradients: Gradients,
        learning_rate_factor: float,
        *,
        in_place: bool = False,
        gradients_are_ours: bool = True,
    ) -> Version:
        """Return the version after `version`, the newest one, made with the sum of the gradients of an update.

        `in_place`: nothing reads `version` any more, so its tensors become the next version. `gradients_are_ours`:
        nothing else needs the sum, so the optimizer may write into it.
        """
        self._refuse_other_rates()
        self.seal.check()
        if not gradients_are_ours:
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
            if not in_place:
                parameter.data = parameter.data.clone()  # the optimizer writes here; the old version stays as it is
        if self._optimizer is not None:
            if not isinstance(learning_rate_factor, (Real, Tensor)) or not 0 <= learning_rate_factor < math.inf:
                raise ValueError(f"learning_rate_factor gave {learning_rate_factor}: must be finite, 0 or more")
            for group, base_rate in zip(self._groups, self._base_rates, strict=True):
                group["lr"] = base_rate * learning_rate_factor
            self._rates = self._rates_now()
            self._delay.step(self._optimizer)
        self.seal.close()  # this also releases the gradients
        return self.newest(version.number + 1)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer else []

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def _refuse_other_rates(self) -> None:
        """Raise ValueError if other code has set a learning rate since the last update, or is about to."""
        if self._rates_now() != self._rates or any("initial_lr" in group for group in self._groups):
            raise ValueError(
                "the learning rate of the optimizer is set from outside, e.g. by a torch.optim.lr_scheduler: it would "
                "meet any of the training steps that are under way. Give the engine the factor on the rate in each "
                "step instead: Engine(..., learning_rate_factor=lambda step: 0.1 ** (step // 1000))"
            )

    @property
    def optimizer_text(self) -> str:
        """The optimizer, and those of its options that are numbers or words, of each group."""
        options = [
            {name: value for name, value in group.items() if isinstance(value, (bool, Real, str, tuple))}
            for group in ({**group, "lr": float(group["lr"])} for group in self._groups)
        ]
        return f"{self._optimizer_class} {options}"

    @property
    def optimized(self) -> list[str]:
        """Names of the optimizer's parameters, in the optimizer's order."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        return [names[parameter] for group in self._groups for parameter in group["params"]]

    def kept_by_optimizer(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps for each parameter, such as momentum."""
        entries = self._optimizer.state if self._optimizer else {}
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in entries.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def state_dict(self, versions: Mapping[int, Version]) -> dict[str, Any]:
        """Return the optimizer's state and the tensors of `versions`, named by version and parameter."""
        return {
            "versions": {
                number: {name: tensor.detach() for name, tensor in version.tensors.items()}
                for number, version in versions.items()
            },
            "optimizer": {"class": self._optimizer_class, "state": self._optimizer and self._optimizer.state_dict()},
        }

    def check_state(self, state: dict[str, Any], needed_versions: set[int]) -> None:
        """Raise ValueError if `load_state_dict` could not load this state."""
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
        saved = state["optimizer"]["state"] or {"param_groups": (), "state": {}}
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        if theirs != (ours := [len(group["params"]) for group in self._groups]):
            raise ValueError(
                f"the checkpoint is of an optimizer with groups of {theirs} parameters, "
                f"this engine's has groups of {ours}"
            )
        if unknown := saved["state"].keys() - {index for group in saved["param_groups"] for index in group["params"]}:
            raise ValueError(f"the checkpoint's optimizer has a state of parameters in no group: {sorted(unknown)[:3]}")
        for tensors in state["versions"].values():
            check_same_tensors(self._parameters, tensors)

    def load_state_dict(self, state: dict[str, Any]) -> dict[int, Version]:
        """Load a copy of what `state_dict` returned and `check_state` accepts; return its versions by number."""
        if self._optimizer is not None:
            load_optimizer(self._optimizer, copy.deepcopy(state["optimizer"]["state"]))
        newest, found = max(state["versions"]), {}
        for number in sorted(state["versions"]):
            for name, parameter in self._parameters.items():
                parameter.data = copied_like(parameter, state["versions"][number][name])
            found[number] = self.newest(number, newest - number)
        self._rates = self._rates_now()
        self.seal.open()
        return found

    @property
    def _optimizer_class(self) -> str | None:
        """Name of the optimizer's class, and of the method against delay if it keeps last steps."""
        method = f" with {self._delay.name}" if self._delay.kept_steps else ""
        return f"{type(self._optimizer).__name__}{method}" if self._optimizer else None


Buffers = dict[str, Tensor]
"""One set of the buffers of a stage, by name."""


def average(sets: Sequence[Mapping[str, Tensor]]) -> Buffers:
    """Return the buffers of a stage: the mean over all sets; from set 0, those that are whole numbers or alike.

    A mean of equal numbers may differ from them: by a rounding, or as their sum overflows.

    Raises:
        ValueError: two sets have a buffer of other shapes: a forward after the first has changed one of them.
    """
    for name, first in sets[0].items():
        if len(shapes := {tuple(buffers[name].shape) for buffers in sets}) > 1:
            raise ValueError(
                f"the sets of the buffer {name} have the shapes {', '.join(map(str, sorted(shapes)))}: a stage changes "
                f"that of one in a forward; keep {tuple(first.shape)} from the start"
            )
    return {name: _mean([buffers[name] for buffers in sets]) for name in sets[0]}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    has_mean = first.is_floating_point() or first.is_complex()
    return torch.stack([*tensors]).mean(0) if has_mean and not all(torch.equal(first, t) for t in tensors) else first


def check_buffers(mine: Mapping[str, Tensor], state: Sequence[Mapping[str, Tensor]], sets: int) -> None:
    """Raise ValueError unless `state` has `sets` sets of buffers like `mine`."""
    if len(state) != sets:
        raise ValueError(f"the checkpoint has {len(state)} sets of buffers, this run has {sets}")
    for theirs in state:
        check_same_tensors(mine, theirs)


def check_same_tensors(mine: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the names, shapes or types of two sets of tensors differ."""
    expected = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    found = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    if others := sorted(differing(expected, found)):
        shown = ", ".join(f"{name}: {found.get(name)} for {expected.get(name)}" for name in others[:3])
        raise ValueError(f"the checkpoint is of another model: {len(others)} tensors differ, e.g. {shown}")
    for name, tensor in mine.items():
        if loaded[name].dtype != tensor.dtype:
            raise ValueError(
                f"the checkpoint is of another precision: {name} is {loaded[name].dtype}, here {tensor.dtype}; convert "
                f"the stages to {loaded[name].dtype} before they are given to the engine"
            )


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes that an optimizer keeps for each value of its parameters; of shards, those on this rank."""
    if optimizer is None:
        return 0
    kept = (
        value.to_local() if hasattr(value, "to_local") else value
        for parameter, entry in optimizer.state.items()
        for value in entry.values()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )
    return sum(value.nbytes for value in kept)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, with scalars in the type in which they were saved, others as parameters lie.

    torch gives all tensors but `step` the type of their parameter: NAdam's `mu_product`, a fp32 product over all steps,
    would be rounded otherwise from there on. It leaves them as they lie in memory, by which fused kernels pair values.
    """
    optimizer.load_state_dict(state)
    saved = (state["state"].get(index, {}) for group in state["param_groups"] for index in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter, entry in zip(parameters, saved, strict=True):
        for name, value in entry.items():
            if not isinstance(value, Tensor):
                continue
            kept = optimizer.state[parameter]  # not before: asking for it makes one
            if not value.ndim:
                kept[name] = value.to(kept[name].device)
            elif value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[name] = copied_like(parameter, kept[name])


def copied_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the device of another, which lies in memory as that does.

    Where it lies otherwise, kernels may add in another order. Messages between ranks do not keep how tensors lie.
    """
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor.detach())


def _made(optimizer: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a stage; raise ValueError unless it has exactly these parameters."""
    made = optimizer(list(parameters))
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer made a {type(made).__name__}, not an optimizer of torch: {_FACTORY}")
    if any("lr" not in group for group in made.param_groups):
        raise ValueError(
            f"optimizer made a {type(made).__name__} without a learning rate, which learning_rate_factor scales: give "
            "each of its groups an 'lr'"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer made a {type(made).__name__}, whose step computes the loss again and again: an update here has "
            "the gradients of one read each; use one whose step() needs no closure, such as torch.optim.SGD"
        )
    found = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if found != {id(parameter) for parameter in parameters}:
        raise ValueError(
            f"optimizer made one of {len(found)} parameters, not of the {len(parameters)} given: {_FACTORY}"
        )
    return made
