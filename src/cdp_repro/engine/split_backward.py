"""A backward in two parts: first the gradients of the stage's inputs, later those of its parameters.

The graph of a stage is a path of operations from its input to its output; parameters join it from the side:

    input --> op 1 --> op 2 --> output          op 1 and op 2 are on the way to the input; what lies between them and
               |        |                       their parameters is not.
           weight 1  weight 2

The first part only runs the operations on the way to the input. It keeps the incoming gradients of each operation with
parameters at its side. The second part starts from there: each operation of torch computes in each part only what that
part needs. One written in Python, by `autograd.Function` or activation checkpointing, runs in both.

Some parameters get their gradients in the first part: one that joins the way in more than one place, as it has no
single such operation, and all of a stage that sets hooks on gradients, as these would run in both parts. Only hooks
that the first forward sets on tensors are seen: not those on nodes of the graph, nor where `torch.compile` is used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from cdp_repro.engine.autograd_graph import children_first
from cdp_repro.engine.compute import Gradients, SavedForward, StageCompute, accumulate

_Incoming: TypeAlias = tuple[Tensor | None, ...]


@dataclass
class WeightWork:
    """The work left to do for the gradients of the parameters."""

    compute: StageCompute
    saved: SavedForward
    grad_output: Tensor | None = None
    """The gradient of the stage's output, if nothing has been done yet."""
    incoming: list[tuple[Node, frozenset[str], _Incoming]] = field(default_factory=list)
    """For each operation with parameters at its side: their names, and the gradients of its outputs."""
    early: Gradients = field(default_factory=dict)
    """The gradients of parameters already computed in the first part."""

    def keep(self, node: Node, names: frozenset[str], gradients: _Incoming) -> None:
        """Keep the gradients of an operation's outputs, which has the parameters `names` at its side."""
        self.incoming.append((node, names, gradients))

    def finish(self, sums: Gradients) -> None:
        """Add the gradients of the parameters to `sums`, by name, as `backward` does."""
        if self.grad_output is not None:
            self.compute.backward(self.saved, self.grad_output, sums)
        for name, gradient in self.early.items():
            sums[name] = sums[name].add_(gradient) if name in sums else gradient
        parameters = self.saved.version.trainable
        for node, names, gradients in self.incoming:
            ends = [(GradientEdge(node, k), g) for k, g in enumerate(gradients) if g is not None]
            wanted = {name: parameters[name] for name in names}
            with self.compute.restored(self.saved):
                accumulate(wanted, sums, [edge for edge, _ in ends], [g for _, g in ends], [*wanted.values()])


def backward_input(
    compute: StageCompute, saved: SavedForward, grad_output: Tensor | None
) -> tuple[list[Tensor | None], WeightWork]:
    """Return the gradients of the stage's inputs, None where there is none, and the work left for its parameters.

    `grad_output`, [B/M, ...], is the gradient of the stage's output; None if the loss does not depend on it.
    """
    if saved.edge is None or grad_output is None or (sides := _sides(saved.edge.node, saved)) is None:
        return [None] * len(saved.inputs), WeightWork(compute, saved, grad_output)
    uses = Counter(name for names in sides.values() for name in names)
    parameters = saved.version.trainable
    work = WeightWork(compute, saved)
    late = set() if compute.sets_hooks else {name for name, count in uses.items() if count == 1}
    handles = [
        node.register_prehook(partial(work.keep, node, names))
        for node, joining in sides.items()
        if (names := frozenset(joining & late))
    ]
    wanted = {name: parameters[name] for name in uses if name not in late}
    with compute.restored(saved):
        inputs = [*saved.leaves, *wanted.values()]
        accumulate(wanted, work.early, [saved.edge], [grad_output], inputs, retain_graph=True)
    for handle in handles:
        handle.remove()
    return saved.take_gradients(), work


def _sides(root: Node, saved: SavedForward) -> dict[Node, set[str]] | None:
    """Return the names of the parameters at the side of each operation on the way from the output to the inputs.

    None if there is no such way: no input takes a gradient, or the stage detaches them.
    """
    leaves = {id(each) for each in saved.leaves}
    if not leaves:
        return None
    names = {id(parameter): name for name, parameter in saved.version.trainable.items()}
    reaches_input: dict[Node, bool] = {}
    below: dict[Node, set[str]] = {}
    """For each operation: the parameters that it reaches."""
    found: dict[Node, set[str]] = {}
    for node, children in children_first(root).items():
        place = id(getattr(node, "variable", None))
        reaches_input[node] = place in leaves or any(reaches_input[child] for child in children)
        below[node] = {names[place]} if place in names else set().union(*(below[child] for child in children))
        joining = set[str]().union(*(below[child] for child in children if not reaches_input[child]))
        if reaches_input[node] and joining:
            found[node] = joining
    return found if reaches_input[root] else None
