"""The layout of a message in memory: its tensors, their order and their shapes.

Sender and receiver derive the same layout from the stages and one micro-batch, so that no message needs a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cdp_repro.engine.compute import Network
from cdp_repro.engine.rehearsal import Rehearsal, fake_tensors
from cdp_repro.launch.team import Team
from cdp_repro.schedule.values import LENT, Kind


@dataclass(frozen=True)
class Layout:
    """The tensors of a message by name, grouped by type, largest elements first so that each tensor is aligned.

    They have shape, strides, type and `requires_grad`, but no memory, and are dense.
    """

    tensors: Mapping[str, Tensor]

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of named tensors; for one with gaps or overlaps, that of a dense copy."""
        found = {n: torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for n, t in tensors.items()}
        return cls(dict(sorted(found.items(), key=lambda item: (-item[1].dtype.itemsize, str(item[1].dtype)))))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(layout.nbytes for layout in self.tensors.values())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors, by name, that a buffer, [nbytes] uint8, holds, as views of it."""
        parts = torch.split(buffer, [layout.nbytes for layout in self.tensors.values()])
        return {
            name: part.view(layout.dtype).as_strided(layout.shape, layout.stride())
            for (name, layout), part in zip(self.tensors.items(), parts, strict=True)
        }

    def values(self, buffer: Tensor) -> list[Tensor]:
        """Return the content of a buffer, [nbytes] uint8, as one vector for each type, as views of it."""
        sizes: dict[torch.dtype, int] = {}
        for layout in self.tensors.values():
            sizes[layout.dtype] = sizes.get(layout.dtype, 0) + layout.nbytes
        parts = torch.split(buffer, [*sizes.values()])
        return [part.view(dtype) for part, dtype in zip(parts, sizes, strict=True)]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if `tensors` are not those of the layout."""
        if tensors.keys() != self.tensors.keys():
            differing = sorted(tensors.keys() ^ self.tensors.keys())
            raise ValueError(
                f"a micro-batch differs from the first in what takes a gradient: {differing[:3]}. Ranks agree once on "
                "what messages hold: use every parameter in every micro-batch, if need be times 0, or "
                "placement=single_device or pipeline"
            )
        for name, layout in self.tensors.items():
            if tensors[name].layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {name} is {tensors[name].layout}, and messages are of dense tensors: leave "
                    "sparse=True out, or use placement=single_device or pipeline"
                )
            if tensors[name].shape != layout.shape:
                raise ValueError(
                    f"a micro-batch makes a tensor {[*tensors[name].shape]} where the first made {[*layout.shape]}: "
                    "ranks that send activations need mini-batches of one size; any sizes work on "
                    "placement=single_device"
                )

    def pack(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return a new buffer, [nbytes] uint8, that holds copies of the tensors.

        Raises:
            ValueError: the tensors are not those of the layout.
        """
        self.check(tensors)
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for name, view in self.views(buffer).items():
            view.copy_(tensors[name].detach())
        return buffer


def broadcast(team: Team, layout: Layout, tensors: Mapping[str, Tensor] | None, source: int) -> Mapping[str, Tensor]:
    """Return the tensors of rank `source`, by name; only that rank must give them. All ranks must call it together."""
    if team.size == 1 or not layout.nbytes:
        return tensors or layout.views(torch.empty(0, dtype=torch.uint8, device=team.device))
    if team.rank == source:
        assert tensors is not None
        dist.broadcast(layout.pack(tensors, team.device), source)
        return tensors
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=team.device)
    dist.broadcast(buffer, source)
    return {name: view.clone() for name, view in layout.views(buffer).items()}


VALUE = "value"
"""The name of the only tensor in a message of activations or of their gradient."""

Layouts = Sequence[Mapping[str, Layout]]
"""For each stage, the layouts of its values by kind; Kind.INPUT is what the reader of its output gets."""

VERSION = ".version"
"""The name of the tensor with the version number that travels with lent parameters; no parameter can have this name."""


def numbered(parameters: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Return parameters, by name, with the number of their version, []; without it if none has values to send."""
    filled = [each for each in parameters.values() if each.nbytes]
    number = {VERSION: filled[0].new_full((), version, dtype=torch.int64)} if filled else {}
    return {**parameters, **number}


_REHEARSED = (
    "in the forward that finds the shapes of messages: copies of all stages, and loss_fn, run once on tensors without "
    "values. loss_fn may use its arguments only, not what a forward has left in a stage"
)


def layouts_of(network: Network, inputs: Tensor, targets: Any) -> Layouts:
    """Return the layouts of each stage's values, for micro-batches like (inputs [B/M, ...], targets).

    Raises:
        ValueError: a stage, or the loss, reads a value of a tensor.
    """
    found: list[Mapping[str, Layout]] = []
    stages = network.stages
    with fake_tensors() as convert:
        rehearsal = Rehearsal(network, convert)
        rehearsal.begin(convert(inputs), tree_map_only(Tensor, convert, targets))
        try:
            outputs = [rehearsal.forward(stage) for stage in range(len(stages))]
        except Exception as error:
            error.add_note(_REHEARSED)
            raise
        for number, module in reversed([*enumerate(stages)]):
            made = {VALUE: outputs[number]} if number < len(stages) - 1 else {}
            of_output, gradients = rehearsal.backward()
            parameters = dict(module.named_parameters())
            found.append(
                {
                    Kind.INPUT: Layout.like(made),
                    Kind.OUTPUT_GRADIENT: Layout.like(made if of_output is not None else {}),
                    Kind.GRADIENTS: Layout.like({name: parameters[name] for name in gradients}),
                    **dict.fromkeys(LENT, Layout.like(numbered(parameters, 0))),
                    Kind.BUFFERS: Layout.like(dict(module.named_buffers())),
                }
            )
    return found[::-1]
