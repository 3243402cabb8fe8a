"""The graph that autograd has recorded of a forward."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node


def children_first(root: Node) -> dict[Node, list[Node]]:
    """Return all operations of a graph with their children; each comes after its children."""
    children: dict[Node, list[Node]] = {}
    found: dict[Node, list[Node]] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node not in children:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += children[node]
        else:  # all that was above it on the stack, and so every child, has been found
            found.setdefault(stack.pop(), children[node])
    return found


def leaves_of(output: Tensor) -> list[Tensor]:
    """Return the leaf tensors that would receive gradients through the graph of `output`."""
    nodes = children_first(output.grad_fn) if output.grad_fn is not None else ()
    return [each.variable for each in nodes if hasattr(each, "variable")]  # nodes that accumulate a leaf's gradient
