"""Forward and backward of one stage on one micro-batch, as two separate calls.

The backward needs the graph of the forward, not its output. So only the edge of the graph is kept, and the output lives
exactly as long as its values are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cdp_repro.engine.binding import Binding
from cdp_repro.engine.checkpointing import RefusingReentrant
from cdp_repro.engine.first_forward import HookWatch, check_what_it_made, reaches_all
from cdp_repro.engine.loan import Loan
from cdp_repro.engine.memory import ActivationMeter, storage_key
from cdp_repro.engine.prefix import Prefix, causal_layers
from cdp_repro.schedule.branches import Sources

LossFn = Callable[[Tensor, Any], Tensor]
"""(output of the last stage, targets) -> loss."""
Autocast = Callable[[], AbstractContextManager[object]]
Gradients = dict[str, Tensor]
"""Gradients, or sums of them, by the name of their parameter, whose shape they have."""


@dataclass(frozen=True)
class Version:
    """One version of one stage's parameters: theta[number], never changed in place while it is still read."""

    number: int
    tensors: Mapping[str, Tensor]
    step: Mapping[str, Tensor] = field(default_factory=dict)
    """By name: the optimizer's step that made this version, used to read ahead; empty if stale reads do not."""
    _ahead: WeakValueDictionary[int, Version] = field(default_factory=WeakValueDictionary)
    """Moved-on copies that micro-batches under way have read, by number of steps ahead."""

    @cached_property
    def trainable(self) -> dict[str, Tensor]:
        """The tensors that receive gradients, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def read_in(self, step: int) -> Version:
        """Return the parameters as the micro-batches of a training step read them: this version, which may be stale.

        If stale reads read ahead, return theta - s `self.step` with s = `step` - number. Micro-batches share this copy;
        it lives as long as one of them needs it.
        """
        ahead = step - self.number
        if not ahead or not self.step:
            return self
        found = self._ahead.get(ahead)
        if found is None:
            found = self._ahead[ahead] = Version(self.number, {name: self._moved(name, ahead) for name in self.tensors})
        return found

    def _moved(self, name: str, steps: int) -> Tensor:
        """Return a parameter moved on by `steps` steps like its last one; unchanged if it has none."""
        tensor = self.tensors[name]
        if name not in self.step:
            return tensor
        moved = torch.empty_like(tensor, requires_grad=False)  # torch may choose other strides than the parameter's
        torch.sub(tensor.detach(), self.step[name], alpha=steps, out=moved)
        return moved.requires_grad_(tensor.requires_grad)


class SavedForward(NamedTuple):
    """The data that a forward leaves for its backward."""

    version: Version
    inputs: tuple[Tensor | None, ...]
    """Each of the stage's inputs if it takes a gradient (a leaf), else None."""
    edge: GradientEdge | None
    """Where the gradient of the output enters the graph; None if nothing in the stage takes a gradient."""
    buffers: Mapping[str, Tensor]
    """The buffers that the forward read."""
    loan: Loan | None
    """Where the graph finds the parameters, if the backward brings them."""
    prefix: Prefix | None
    """The prefix of the slice, if sequences are cut."""

    @property
    def leaves(self) -> list[Tensor]:
        """The inputs, [B/M, ...] each, that take a gradient."""
        return [each for each in self.inputs if each is not None]

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters that the backward reads, by name: those that it has brought, or else the forward's."""
        return self.version.tensors if self.loan is None else self.loan.tensors

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the inputs, [B/M, ...] or None where there is none, and clear them on the inputs."""
        found = [None if each is None else each.grad for each in self.inputs]
        for leaf in self.leaves:
            leaf.grad = None
        return found


class StageCompute:
    """Runs one stage; holds what every call has in common."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn | None,
        autocast: Autocast = nullcontext,
        splits_backward: bool = False,
    ) -> None:
        """The last stage computes the loss as part of its forward; the others have no `loss_fn`.

        `splits_backward`: backwards run in two parts, so the first forward also looks whether the stage sets hooks on
        gradients.
        """
        self._module = module
        self._binding = Binding(module)
        self._causal = causal_layers(module)
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._has_run = False
        # what torch.compile has made would be compiled once more, without the watch
        is_watched = splits_backward and not any("_orig_mod" in part._modules for part in module.modules())
        self._hooks = HookWatch() if is_watched else None

    @property
    def sets_hooks(self) -> bool:
        """Whether the first forward has set hooks on gradients; looked for only if backwards are split."""
        return self._hooks is not None and self._hooks.found

    def forward(
        self,
        version: Version,
        buffers: MutableMapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Any,
        meter: ActivationMeter | None,
        loan: Loan | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, SavedForward]:
        """Return the output of the stage (of the last stage: the loss, a scalar) and what the backward needs.

        `inputs` are [micro-batch, ...] each, several where branches join. `buffers` (BatchNorm's running statistics)
        are updated. A meter counts saved tensors, inputs that take a gradient, and the output unless it is the loss. A
        `loan` holds the tensors of `version`; with it, saved tensors keep none of them alive. With a `prefix`, the
        input, [micro-batch, tokens, ...], continues where the prefix ends.
        """
        leaves, buffers_before = tuple(each if each.requires_grad else None for each in inputs), dict(buffers)
        writes = [tensor._version for tensor in version.tensors.values()]
        for leaf in leaves:
            if meter is not None and leaf is not None:
                meter.hold(leaf)
        saving = nullcontext() if meter is None and loan is None else _saving(meter, loan, version, buffers)
        known = nullcontext() if prefix is None else prefix.known_to(self._causal)
        watching = self._hooks if self._hooks is not None and not self._has_run else nullcontext()
        with self._autocast(), saving, self._binding.bound(version.tensors, buffers), known, watching:
            output = self._output_of(inputs)
            if prefix is not None:
                prefix.advance(self._causal, inputs[0].shape[1])
            if self._loss_fn is not None:
                output = _loss_of(self._loss_fn, output, targets)
        if writes != [tensor._version for tensor in version.tensors.values()]:
            raise _changed_parameter(version, writes)
        if not self._has_run:
            self._has_run = True
            given = [*version.trainable.values(), *inputs, *(prefix.leaves if prefix else ())]
            check_what_it_made(self._module, buffers_before, buffers, given, output)
            if not reaches_all(version.trainable.values(), given, output):
                with self._autocast(), self._binding.bound_again(version.tensors, buffers_before), RefusingReentrant():
                    self._module(*inputs)
        edge = get_gradient_edge(output) if output.requires_grad else None
        output = output.detach()
        if loan is not None:
            output = loan.kept_apart(output)
        if meter is not None and self._loss_fn is None:
            meter.hold(output)
        return output, SavedForward(version, leaves, edge, buffers_before, loan, prefix)

    def _output_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the output of the module with the tensors that are now in place."""
        try:
            output = self._module(*inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise ValueError(
                "a stage changes its input in place, which is the output of the stage before: use inplace=False in the "
                "layer that comes first, or put it at the end of the stage before"
            ) from error
        if not isinstance(output, Tensor):
            raise TypeError(f"a stage must return one tensor, the next stage's input; got {type(output).__name__}")
        return output

    def restored(self, saved: SavedForward) -> AbstractContextManager[None]:
        """Return a context with the parameters and buffers for what the backward of `saved` recomputes."""
        return self._binding.bound_again(saved.parameters, saved.buffers)

    def backward(
        self,
        saved: SavedForward,
        grad_output: Tensor | None,
        sums: Gradients,
        later: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of the stage's inputs, None where there is none; add those of its parameters to `sums`.

        `grad_output` is the gradient of the stage's output; None if the loss does not depend on it. `sums` are by name.
        They omit parameters that the loss does not depend on, whose `.grad` torch leaves at None. Autograd accumulates:
        it adds in place, and reuses the tensor of a first gradient if nothing else holds it.

        `later` are the gradients of what the layers have kept for the slices after this one, by layer.

        For activation checkpointing to recompute with, `saved.parameters` are in place. It reads copies of the buffers,
        which it must not update twice.
        """
        parameters = saved.version.trainable
        if saved.edge is None or grad_output is None:
            return [None] * len(saved.inputs)
        edges, gradients = [saved.edge], [grad_output]
        if later:
            assert saved.prefix is not None
            edges += [saved.prefix.edges[name] for name in later]
            gradients += later.values()
        known = nullcontext() if saved.prefix is None else saved.prefix.known_to(self._causal)
        with self.restored(saved), known:
            accumulate(parameters, sums, edges, gradients)
        return saved.take_gradients()


@dataclass(frozen=True)
class Network:
    """What a micro-batch passes through, and how its forwards run."""

    stages: Sequence[nn.Module]
    loss_fn: LossFn
    autocast: Autocast = nullcontext
    """Makes the context of a forward."""
    sources: Sources = ()
    """For each stage, the stages whose outputs it reads; () for a chain."""

    def compute(self, splits_backward: bool = False) -> list[StageCompute]:
        """Return the compute of each stage; see `StageCompute`."""
        last = len(self.stages) - 1
        return [
            StageCompute(stage, self.loss_fn if number == last else None, self.autocast, splits_backward)
            for number, stage in enumerate(self.stages)
        ]


def accumulate(
    parameters: Mapping[str, Tensor],
    sums: Gradients,
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """Run autograd from `edges`; add the gradients of `parameters` to `sums`, by name.

    If `inputs` are given, only they take gradients. A whole backward gives none, because finding the way to them would
    cost autograd a walk over the graph. It needs none: the check of the first forward has shown that the graph of the
    stage ends in no other tensors.
    """
    for name in sums.keys() & parameters.keys():
        parameters[name].grad = sums[name]
    torch.autograd.backward(edges, gradients, inputs=inputs, retain_graph=retain_graph)
    for name, parameter in parameters.items():
        if (gradient := parameter.grad) is not None:
            sums[name], parameter.grad = gradient, None


def _changed_parameter(version: Version, writes: Sequence[int]) -> ValueError:
    """Return the error of a forward that has written to its parameters; `writes` counts the writes before it."""
    numbers = zip(version.tensors.items(), writes, strict=True)
    changed = [name for (name, tensor), number in numbers if tensor._version != number]
    return ValueError(
        f"a stage changes its parameter {changed[0]} in a forward, as Embedding(max_norm=...) does: micro-batches "
        "would read different parameters under one version. Do it after the update, in a hook set by "
        "optimizer.register_step_post_hook, or compute with a changed copy"
    )


def _loss_of(loss_fn: LossFn, output: Tensor, targets: Any) -> Tensor:
    """Return the loss of a micro-batch: a scalar that depends on the output."""
    loss = loss_fn(output, targets)
    if not isinstance(loss, Tensor) or loss.ndim:
        got = loss.shape if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn must return a scalar tensor, the mean over the micro-batch; got {got}")
    if output.requires_grad and not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that has no gradient: leave out detach(), item() and torch.no_grad() in it"
        )
    return loss


def _saving(
    meter: ActivationMeter | None, loan: Loan | None, version: Version, buffers: Mapping[str, Tensor]
) -> AbstractContextManager[object]:
    """Return a context in which `meter` counts what autograd saves, and `loan` stands in for saved parameters.

    The parameters of `version` and `buffers` are not counted. With hooks, autograd does not see that a saved tensor is
    changed before the backward, so that is checked here.
    """
    excluded = {storage_key(tensor) for tensor in (*version.tensors.values(), *buffers.values())} if meter else set()

    def pack(tensor: Tensor) -> Any:
        if loan is not None and (borrowed := loan.pack(tensor)) is not None:
            return borrowed
        if meter is not None and storage_key(tensor) not in excluded:
            meter.hold(tensor)
        # without its graph, else an output that its own node saves would never die
        return tensor.detach(), tensor._version

    def unpack(packed: Any) -> Tensor:
        if callable(packed):
            borrowed: Tensor = packed()
            return borrowed
        kept: Tensor
        kept, number = packed
        if kept._version != number:
            raise RuntimeError(
                f"a stage changes a tensor {[*kept.shape]} in place that its backward needs: use inplace=False in the "
                "layer that does, or change a copy"
            )
        return kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
