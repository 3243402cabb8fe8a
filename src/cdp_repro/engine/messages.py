"""What a message looks like in memory: which tensors, in which order, of which shape.

Sender and receiver derive it alike from the stages and one micro-batch, so that no message needs a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from cdp_repro.engine.compute import LossFn
from cdp_repro.engine.rehearsal import Autocast, Rehearsal, fake_tensors
from cdp_repro.schedule import Value
from cdp_repro.schedule.branches import Sources, chain
from cdp_repro.schedule.values import BUFFERS, GRADIENTS, INPUT, OUTPUT_GRADIENT, PARAMETERS


@dataclass(frozen=True)
class TensorLayout:
    """Shape, strides and type of a tensor that is dense in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a dense tensor; of one with gaps or overlaps, that of a contiguous copy."""
        dense = torch.empty_like(tensor, device="meta")
        return cls(tuple(dense.shape), tuple(dense.stride()), dense.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The tensors of a message by name, largest elements first, so that each is aligned, those of one type together."""

    tensors: Mapping[str, TensorLayout]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of named tensors."""
        layouts = {name: TensorLayout.of(tensor) for name, tensor in tensors.items()}
        return cls(dict(sorted(layouts.items(), key=lambda item: (-item[1].dtype.itemsize, str(item[1].dtype)))))

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(layout.nbytes for layout in self.tensors.values())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a buffer of `nbytes` bytes holds, as views of it."""
        sizes = [layout.nbytes for layout in self.tensors.values()]
        starts = accumulate(sizes, initial=0)
        return {
            name: buffer[start : start + size].view(layout.dtype).as_strided(layout.shape, layout.stride)
            for (name, layout), start, size in zip(self.tensors.items(), starts, sizes, strict=False)
        }

    def values(self, buffer: Tensor) -> list[Tensor]:
        """Return what a buffer of `nbytes` bytes holds as one vector for each type, views of it."""
        sizes: dict[torch.dtype, int] = {}
        for layout in self.tensors.values():
            sizes[layout.dtype] = sizes.get(layout.dtype, 0) + layout.nbytes
        parts = torch.split(buffer, [*sizes.values()])
        return [part.view(dtype) for part, dtype in zip(parts, sizes, strict=True)]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if `tensors` are not those of the layout."""
        if tensors.keys() != self.tensors.keys():
            differing = sorted(tensors.keys() ^ self.tensors.keys())
            raise RuntimeError(f"a micro-batch differs from the first in what takes a gradient: {differing[:3]}")

    def pack(self, tensors: Mapping[str, Tensor], device: torch.device, before: int = 0) -> Tensor:
        """Return a new buffer that holds copies of the tensors, behind `before` bytes for something else.

        Raises:
            RuntimeError: they are not those of the layout.
        """
        self.check(tensors)
        buffer = torch.empty(before + self.nbytes, dtype=torch.uint8, device=device)
        for name, view in self.views(buffer[before:]).items():
            view.copy_(tensors[name].detach())
        return buffer


VALUE = "value"
"""The name of the one tensor of a message with activations or their gradient."""


@dataclass(frozen=True)
class Layouts:
    """What each value looks like when it is sent."""

    stages: Sequence[Mapping[str, Layout]]
    """Of each stage by the kind of value; INPUT is that of the next one, its output."""

    def of(self, value: Value) -> Layout:
        """Return the layout of a value, whole."""
        layouts = self.stages[value.stage - 1 if value.kind == INPUT else value.stage]
        return layouts.get(value.kind, layouts[PARAMETERS])  # of lent ones, too


def layouts_of(
    stages: Sequence[nn.Module],
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    autocast: Autocast,
    sources: Sources = (),
) -> Layouts:
    """Return what the values of each stage look like, for micro-batches like (inputs, targets)."""
    outputs: dict[int, Tensor] = {}
    with_gradient: set[int] = set()
    with fake_tensors() as convert:
        rehearsal = Rehearsal(stages, loss_fn, autocast, convert, sources)
        rehearsal.begin(convert(inputs), convert(targets))
        for stage in range(len(stages)):
            rehearsal.forward(stage)
            if stage < len(stages) - 1:
                outputs[stage] = rehearsal.outputs[stage]
        gradients = []
        for read in (sources or chain(len(stages)))[::-1]:
            of_inputs, of_parameters = rehearsal.backward()
            gradients.append(of_parameters)
            with_gradient |= {source for source, each in zip(read, of_inputs, strict=False) if each is not None}
        found = []
        for number, (module, of_parameters) in enumerate(zip(stages, gradients[::-1], strict=True)):
            parameters = dict(module.named_parameters())
            made = {VALUE: outputs[number]} if number in outputs else {}
            found.append(
                {
                    INPUT: Layout.of(made),
                    OUTPUT_GRADIENT: Layout.of(made if number in with_gradient else {}),
                    GRADIENTS: Layout.of({name: parameters[name] for name in of_parameters}),
                    PARAMETERS: Layout.of(parameters),
                    BUFFERS: Layout.of(dict(module.named_buffers())),
                }
            )
    return Layouts(found)
