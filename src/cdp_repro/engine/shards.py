"""Shards: a stage's parameters and gradients cut into one part for each rank, and put together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdp_repro.engine.layouts import Layout
from cdp_repro.engine.parameters import check_same_tensors
from cdp_repro.engine.transfers import Transfer
from cdp_repro.schedule import part_bytes

State = dict[str, Any]
Views = Callable[[Tensor], dict[str, Tensor]]
"""What finds named tensors in a buffer."""


class Shards:
    """How the parameters of one stage are shared out among all ranks.

    Parameters of one type lie end to end in a block, those that take gradients in a block of their own. A rank's shard
    is one of as many equal parts of each block as there are ranks; the last may be short, and is padded to be sent. A
    parameter so has a piece on every rank, perhaps an empty one: a tensor [values, 1, ..., 1] of as many dimensions.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._rank = rank
        self._device = device
        kinds: dict[tuple[torch.dtype, bool], dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
        self._layouts = [Layout.of(tensors) for tensors in kinds.values()]
        """Of each block."""
        self._sizes = [part_bytes(layout.nbytes, ranks) for layout in self._layouts]
        """Bytes of a rank's part of each block."""

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of this rank's pieces of the stage's `tensors`, or of some of them."""
        shard = self._buffer(1)
        for part, block in zip(self._parts(shard), self._blocks_of(self._packed(tensors)), strict=True):
            part.copy_(block.view(self._ranks, -1)[self._rank])
        pieces = self._pieces_in(shard, self._rank)
        return {name: pieces[name].clone() for name in tensors}

    def joined(self, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors whose pieces on each rank are `pieces`."""
        whole = self._buffer(self._ranks)
        for rank, present in enumerate(pieces):
            shard = self._shard_of(present, rank)
            for part, block in zip(self._parts(shard), self._blocks_of(whole), strict=True):
                block.view(self._ranks, -1)[rank].copy_(part)
        tensors = self._tensors_in(whole)
        return {name: tensors[name].clone() for name in pieces[0]}

    def gather(self, pieces: Mapping[str, Tensor]) -> tuple[Transfer, Views]:
        """Start to gather the tensors of which this rank has `pieces`, in one buffer. All ranks must take part."""
        shard, whole = self._shard_of(pieces, self._rank), self._buffer(self._ranks)
        works = [
            dist.all_gather_into_tensor(block, part, async_op=True)
            for block, part in zip(self._blocks_of(whole), self._parts(shard), strict=True)
        ]
        return Transfer.of(whole, *works, source=shard), self._tensors_in

    def reduce(self, gradients: Mapping[str, Tensor]) -> tuple[Transfer, Views]:
        """Start to add all ranks' `gradients`; each gets its pieces of the sums. All ranks must take part."""
        names = {*gradients}  # not the gradients themselves, which need not live until the sums are here
        whole, shard = self._packed(gradients), self._buffer(1)
        works = [
            dist.reduce_scatter_tensor(part.view(dtype), block.view(dtype), async_op=True)
            for layout, block, part in zip(self._layouts, self._blocks_of(whole), self._parts(shard), strict=True)
            for dtype in {layout.tensors[name].dtype for name in layout.tensors.keys() & names}
        ]
        return Transfer.of(shard, *works, source=whole), lambda received: {
            name: piece for name, piece in self._pieces_in(received, self._rank).items() if name in names
        }

    def cut_state(self, state: State, names: Sequence[str]) -> State:
        """Return this rank's part of a whole stage's state, as `StageState.state_dict` returns them.

        `names` are those of the optimizer's parameters, in its order.

        Raises:
            ValueError: it is of another model.
        """
        whole = {name: layout for block in self._layouts for name, layout in block.tensors.items()}
        for tensors in state["versions"].values():
            check_same_tensors(whole, tensors)
        shapes = {name: layout.shape for name, layout in whole.items()}
        return _converted([state], names, shapes, lambda tensors: self.pieces(*tensors))

    def join_states(self, states: Sequence[State], names: Sequence[str]) -> State:
        """Return the whole stage's state, of which each rank has one of `states`; `names` as in `cut_state`."""
        first = self._pieces_in(self._buffer(1), rank=0)
        return _converted(states, names, {name: tuple(piece.shape) for name, piece in first.items()}, self.joined)

    def _buffer(self, shards: int) -> Tensor:
        """Return a new buffer for so many ranks' parts of all blocks: of one, or the padded blocks themselves."""
        return torch.zeros(shards * sum(self._sizes), dtype=torch.uint8, device=self._device)

    def _parts(self, shard: Tensor) -> Sequence[Tensor]:
        """Return one rank's part of each block."""
        return torch.split(shard, self._sizes)

    def _blocks_of(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the padded blocks."""
        return torch.split(whole, [self._ranks * size for size in self._sizes])

    def _packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a buffer of the padded blocks with copies of `tensors`, and zeros elsewhere."""
        whole = self._buffer(self._ranks)
        for name, view in self._tensors_in(whole).items():
            if name in tensors:
                view.copy_(tensors[name].detach())
        return whole

    def _shard_of(self, pieces: Mapping[str, Tensor], rank: int) -> Tensor:
        """Return a buffer of `rank`'s parts of all blocks with copies of `pieces`, and zeros elsewhere."""
        shard = self._buffer(1)
        for name, view in self._pieces_in(shard, rank).items():
            if name in pieces:
                view.copy_(pieces[name].detach())
        return shard

    def _tensors_in(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a buffer of the padded blocks, as views of it."""
        return {
            name: view
            for layout, block in zip(self._layouts, self._blocks_of(whole), strict=True)
            for name, view in layout.views(block[: layout.nbytes]).items()
        }

    def _pieces_in(self, shard: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the pieces in a buffer of `rank`'s parts of all blocks, as views of it."""
        return {
            name: piece
            for layout, part in zip(self._layouts, self._parts(shard), strict=True)
            for name, piece in _pieces_of(layout, part, rank * len(part))
        }


def _pieces_of(layout: Layout, part: Tensor, first: int) -> Iterator[tuple[str, Tensor]]:
    """Yield by name what lies of each tensor in `part`, the bytes from `first` on of a block."""
    start = -first
    for name, tensor in layout.tensors.items():
        end = start + tensor.nbytes
        inside = part[max(0, start) : max(0, end)].view(tensor.dtype)
        yield name, inside.view(-1, *(1 for _ in tensor.shape[1:]))
        start = end


def _converted(
    states: Sequence[State],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    convert: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]],
) -> State:
    """Return the state that has `convert` of what has a value for each parameter in `states`, else what the first has.

    `shapes` are those of the parameters in the first state: what the optimizer keeps for each value has the same.
    """
    first = states[0]
    versions = {number: convert([state["versions"][number] for state in states]) for number in first["versions"]}
    optimizer = copy.copy(first["optimizer"])
    if optimizer["state"] is not None:
        entries = [state["optimizer"]["state"]["state"] for state in states]
        found = {index: dict(entry) for index, entry in entries[0].items()}
        for key in {key: None for entry in found.values() for key in entry if key != "step"}:  # may be a 0-d tensor
            kept = {name: i for i, name in enumerate(names) if _shape(found.get(i, {}).get(key)) == shapes[name]}
            converted = convert([{name: entry[i][key] for name, i in kept.items()} for entry in entries])
            for name, i in kept.items():
                found[i][key] = converted[name]
        optimizer["state"] = {**optimizer["state"], "state": found}
    return {**first, "versions": versions, "optimizer": optimizer}


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
