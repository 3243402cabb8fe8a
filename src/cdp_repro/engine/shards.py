"""Shards: cuts a stage's parameters and gradients into one part for each rank, and joins them again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdp_repro.engine.messages import Layout
from cdp_repro.engine.parameters import OptimizerFactory, check_same_tensors
from cdp_repro.engine.transfers import Transfer
from cdp_repro.schedule.parts import part_bytes

_SCALARS = {"step", "mu_product", "eta", "mu"}
"""What torch's optimizers keep once for each parameter: as a 0-d tensor, it looks like a value of a 0-d parameter."""

_OF_MATRICES = {"Muon", "Adafactor"}
"""Classes of torch's optimizers whose steps depend on the shape of a parameter."""

State = dict[str, Any]
Views = Callable[[Tensor], dict[str, Tensor]]
"""A function that finds named tensors in a buffer."""


class Shards:
    """How the parameters of one stage are divided among all ranks.

    Parameters of one type lie end to end in a block; those that take gradients have a separate block. Each block is cut
    into as many equal parts as there are ranks, and a rank's shard is one part of each. The last part may be short; it
    is padded when sent. So a parameter has a piece on every rank, which may be empty: a tensor [values, 1, ..., 1] with
    as many dimensions as the parameter, but at least one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._rank = rank
        self._device = device
        kinds: dict[tuple[torch.dtype, bool], dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
        self._types = [dtype for dtype, _ in kinds]
        """Type of each block."""
        self._layouts = [Layout.like(tensors) for tensors in kinds.values()]
        """Layout of each block."""
        self._sizes = [part_bytes(layout.nbytes, ranks) for layout in self._layouts]
        """Bytes of a rank's part of each block."""

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of this rank's pieces of `tensors`: all or some of the stage's, by name, of any types."""
        found = {}
        for name, tensor in tensors.items():
            layout = self._whole[name]
            dense = torch.empty_strided(layout.shape, layout.stride(), dtype=tensor.dtype, device=self._device)
            first, end = self._ends[name][self._rank : self._rank + 2]
            flat = dense.copy_(tensor.detach()).as_strided((dense.numel(),), (1,))
            found[name] = flat[first:end].clone().view(_piece_shape(layout.shape))
        return found

    def joined(self, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return, on the CPU, the tensors joined from each rank's `pieces`, [values, 1, ..., 1], by name."""
        found = {}
        for name in pieces[0]:
            layout = self._whole[name]
            flat = torch.cat([each[name].detach().cpu().flatten() for each in pieces])
            found[name] = flat.as_strided(layout.shape, layout.stride())
        return found

    def optimizer(self, make: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> OptimizerFactory:
        """Return a function that makes the optimizer of the pieces of the trainable `parameters`, in their order.

        `make` sees the parameters themselves, so that it groups them as on a single device.
        """

        def make_of_pieces(pieces: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = make([*parameters])
            if found := {kind.__name__ for kind in type(optimizer).__mro__} & _OF_MATRICES:
                raise ValueError(
                    f"{found.pop()} computes with whole matrices, of which a rank that holds shards has pieces: use "
                    "collectives=False, or an optimizer that treats each value by itself, as SGD and Adam do"
                )
            if optimizer.state:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps values of its parameters before its first step, which cannot be "
                    "cut into shards: use collectives=False"
                )
            piece_of = dict(zip(parameters, pieces, strict=True))
            for group in optimizer.param_groups:
                group["params"] = [piece_of[parameter] for parameter in group["params"]]
            return optimizer

        return make_of_pieces

    def gather(self, pieces: Mapping[str, Tensor]) -> tuple[Transfer, Views]:
        """Start to gather, in one buffer, the tensors of which this rank has `pieces`, by name; collective."""
        shard, whole = self._buffer(1), self._buffer(self._ranks)
        for name, view in self._pieces_in(shard).items():
            view.copy_(pieces[name].detach())
        works = [
            dist.all_gather_into_tensor(block, part, async_op=True)
            for block, part in zip(self._blocks_of(whole), self._parts(shard), strict=True)
        ]
        return Transfer(works, whole, shard), self._tensors_in

    def reduce(self, gradients: Mapping[str, Tensor]) -> tuple[Transfer, Views]:
        """Start to add all ranks' `gradients`, by name; each gets its pieces of the sums; collective."""
        names = {*gradients}  # the lambda below must not keep the gradients alive until the sums arrive
        whole, shard = self._buffer(self._ranks).zero_(), self._buffer(1)
        for name, view in self._tensors_in(whole).items():
            if name in names:
                view.copy_(gradients[name])
        works = [
            dist.reduce_scatter_tensor(part.view(dtype), block.view(dtype), async_op=True)
            for dtype, layout, block, part in zip(
                self._types, self._layouts, self._blocks_of(whole), self._parts(shard), strict=True
            )
            if layout.tensors.keys() & names
        ]
        return Transfer(works, shard, whole), lambda received: {
            name: piece for name, piece in self._pieces_in(received).items() if name in names
        }

    def cut_state(self, state: State, names: Sequence[str]) -> State:
        """Return this rank's part of a whole stage's state; both are as `StageState.state_dict` returns them.

        `names` are those of the optimizer's parameters, in the optimizer's order.

        Raises:
            ValueError: `state` is of another model.
        """
        for tensors in state["versions"].values():
            check_same_tensors(self._whole, tensors)
        shapes = {name: tuple(layout.shape) for name, layout in self._whole.items()}
        return _converted([state], names, shapes, lambda tensors: self.pieces(*tensors))

    def join_states(self, states: Sequence[State], names: Sequence[str]) -> State:
        """Return the whole stage's state from `states`, one for each rank; `names` as in `cut_state`."""
        shapes = {name: (self._ends[name][1], *_piece_shape(layout.shape)[1:]) for name, layout in self._whole.items()}
        return _converted(states, names, shapes, self.joined)

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        """The layout of each parameter."""
        return {name: tensor for layout in self._layouts for name, tensor in layout.tensors.items()}

    @cached_property
    def _ends(self) -> dict[str, list[int]]:
        """By name: where each rank's piece ends, counted in the parameter's values as they lie in memory; 0 first."""
        found = {}
        for layout, size in zip(self._layouts, self._sizes, strict=True):
            start = 0
            for name, tensor in layout.tensors.items():
                borders = (min(max(0, rank * size - start), tensor.nbytes) for rank in range(self._ranks + 1))
                found[name] = [border // tensor.dtype.itemsize for border in borders]
                start += tensor.nbytes
        return found

    def _buffer(self, shards: int) -> Tensor:
        """Return a new buffer for `shards` ranks' parts of all blocks: those of one rank, or the padded blocks."""
        return torch.empty(shards * sum(self._sizes), dtype=torch.uint8, device=self._device)

    def _parts(self, shard: Tensor) -> Sequence[Tensor]:
        """Return one rank's part of each block."""
        return torch.split(shard, self._sizes)

    def _blocks_of(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the padded blocks."""
        return torch.split(whole, [self._ranks * size for size in self._sizes])

    def _tensors_in(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a buffer of the padded blocks, as views of it."""
        return {
            name: view
            for layout, block in zip(self._layouts, self._blocks_of(whole), strict=True)
            for name, view in layout.views(block[: layout.nbytes]).items()
        }

    def _pieces_in(self, shard: Tensor) -> dict[str, Tensor]:
        """Return this rank's pieces in a buffer of its parts of all blocks, as views of it."""
        found = {}
        for layout, part in zip(self._layouts, self._parts(shard), strict=True):
            start = 0
            for name, tensor in layout.tensors.items():
                first, end = self._ends[name][self._rank : self._rank + 2]
                size = (end - first) * tensor.dtype.itemsize
                found[name] = part[start : start + size].view(tensor.dtype).view(_piece_shape(tensor.shape))
                start += size
        return found


def _piece_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return -1, *(1 for _ in shape[1:])


def _converted(
    states: Sequence[State],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    convert: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]],
) -> State:
    """Return the first state with `convert` applied, over all `states`, to entries with one value per parameter value.

    `shapes` are those of the parameters in the first state; such entries of the optimizer have the same shapes.
    """
    first = states[0]
    versions = {number: convert([state["versions"][number] for state in states]) for number in first["versions"]}
    optimizer = copy.copy(first["optimizer"])
    if optimizer["state"] is not None:
        entries = [state["optimizer"]["state"]["state"] for state in states]
        found = {index: dict(entry) for index, entry in entries[0].items()}
        for key in {key: None for entry in found.values() for key in entry}:
            kept = {
                name: i
                for i, name in enumerate(names)
                if _shape(found.get(i, {}).get(key)) == shapes[name] and (shapes[name] or key not in _SCALARS)
            }
            converted = convert([{name: entry[i][key] for name, i in kept.items()} for entry in entries])
            for name, i in kept.items():
                found[i][key] = converted[name]
        optimizer["state"] = {**optimizer["state"], "state": found}
    return {**first, "versions": versions, "optimizer": optimizer}


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
