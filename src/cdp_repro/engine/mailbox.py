"""Messages between ranks: sends that do not block, and receives that are posted before they are needed.

Collectives of all ranks do not block either: their results arrive on each rank like a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.compute import Version
from cdp_repro.engine.delivery import AtOnce, InBatches
from cdp_repro.engine.messages import VALUE, VERSION, Layout, Layouts, numbered
from cdp_repro.engine.shards import Shards, Views
from cdp_repro.engine.transfers import Transfer
from cdp_repro.schedule import RankProgram, Slot, Value
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.values import LENT, Kind

_NUMBER_BYTES = 8
"""Bytes of the version number that travels with lent parameters; reported bytes do not include them."""


@dataclass(frozen=True)
class Pending:
    """A value that is not present yet: a message or collective brings it, or it is made when it is first read."""

    get: Callable[[], Any]
    """Waits for the value, or makes it."""


class Mailbox:
    """One rank's sends and receives. Between two ranks, messages arrive in the order in which they were sent."""

    def __init__(self, layouts: Layouts, shards: Sequence[Shards], program: RankProgram, device: torch.device) -> None:
        """`shards` has one entry per stage if stages are sharded. All ranks must call it together."""
        self._layouts, self._shards, self._device = layouts, shards, device
        self._leaving: dict[Value, tuple[Tensor, set[int]]] = {}
        """For each value being sent: its buffer, and the parts that have not begun."""
        self._arriving: dict[Value, tuple[Tensor, set[int]]] = {}
        """The same for each value that arrives."""
        self._delivery: AtOnce | InBatches = (
            InBatches(program, device, self._landing) if program.in_batches else AtOnce(program, self._landing)
        )

    def begin(self, slot: Slot) -> None:
        """Begin a slot of this rank."""
        self._delivery.begin(slot.batches)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._delivery.flush()

    def send(self, value: Value, peer: int, content: Any) -> int:
        """Start to send a copy of a value, or of a part of it; return the bytes, without those of a version number.

        The first part makes the copy for all parts.
        """
        if value.whole not in self._leaving:
            packed = self._layout(value).pack(_as_message(content), self._device)
            self._leaving[value.whole] = packed, {*range(1, value.parts + 1)}
        buffer = _part(self._leaving, value)
        self._delivery.send(value, peer, buffer)
        return len(buffer) - (_NUMBER_BYTES if value.kind in LENT and len(buffer) else 0)

    def receive(self, value: Value, peer: int) -> Pending:
        """Get ready for a message, or a part of one; the first part brings the tensors of all parts."""
        layout, wait = self._layout(value), self._delivery.receive(value, peer)

        def arrived() -> Any:
            views = layout.views(wait())
            return self._content(value, views if value.part in (0, 1) else {})

        return Pending(arrived)

    def _landing(self, value: Value) -> tuple[Tensor, Tensor]:
        """Return the buffer in which a message arrives, and the part of it that `value` names."""
        if value.whole not in self._arriving:
            whole = torch.empty(self._layout(value).nbytes, dtype=torch.uint8, device=self._device)
            self._arriving[value.whole] = whole, {*range(1, value.parts + 1)}
        return self._arriving[value.whole][0], _part(self._arriving, value)

    def join(self, value: Value, content: Any) -> tuple[Pending, int]:
        """Start this rank's part in the collective that makes `value`, with a copy of `content`.

        Returns the pending result, and the bytes of the whole value.
        """
        layout = self._layout(value)
        # each rank knows the number of the version, even one whose shard is empty
        number = {VERSION: torch.tensor(content.number)} if VERSION in layout.tensors else {}
        views: Views = layout.views
        if not layout.nbytes:
            transfer = Transfer((), torch.empty(0, dtype=torch.uint8, device=self._device))
        elif value.kind in LENT:
            transfer, views = self._shards[value.stage].gather(content.tensors)
        elif value.parts > 1:
            layout.check(content)
            transfer, views = self._shards[value.stage].reduce(content)
        else:
            buffer = layout.pack(content, self._device)
            works = [dist.all_reduce(values, async_op=True) for values in layout.values(buffer)]
            transfer = Transfer(works, buffer)
        size = layout.nbytes - (_NUMBER_BYTES if number else 0)
        return Pending(lambda: self._content(value, views(transfer.wait()) | number)), size

    def _layout(self, value: Value) -> Layout:
        """Return the layout of a whole value."""
        return self._layouts[value.stage - 1 if value.kind == Kind.INPUT else value.stage][value.kind]

    def _content(self, value: Value, tensors: dict[str, Tensor]) -> Any:
        """Return the content of a message in the form in which the executor keeps the value."""
        if value.kind in (Kind.INPUT, *LENT):
            layouts = self._layout(value).tensors
            tensors = {name: tensor.requires_grad_(layouts[name].requires_grad) for name, tensor in tensors.items()}
        if value.kind in LENT:
            number = tensors.pop(VERSION, None)  # parameters without values do not travel
            return Version(value.version if number is None else int(number), tensors)
        if value.kind == Kind.BUFFERS:
            return {name: tensor.clone() for name, tensor in tensors.items()}  # not views of one buffer
        return tensors.get(VALUE) if value.kind in (Kind.INPUT, Kind.OUTPUT_GRADIENT) else tensors


def _as_message(content: Any) -> dict[str, Tensor]:
    """Return the tensors of a value by name; parameters come with the number of their version."""
    if isinstance(content, Version):
        return numbered(content.tensors, content.number)
    if content is None:
        return {}
    return {VALUE: content} if isinstance(content, Tensor) else content


def _part(buffers: dict[Value, tuple[Tensor, set[int]]], value: Value) -> Tensor:
    """Return the part of a message's buffer that `value` names; the last part removes the buffer from `buffers`."""
    buffer, missing = buffers[value.whole]
    missing.discard(value.part or 1)
    if not missing:
        del buffers[value.whole]
    if value.parts == 1:
        return buffer
    inside = part_of(len(buffer), value.part, value.parts)
    return buffer[inside.start : inside.stop]
