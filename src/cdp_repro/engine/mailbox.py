"""Messages between ranks: sends that do not block, and receives that are posted before they are needed.

Collectives of all ranks do not block either: their results arrive on each rank like a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.compute import Version
from cdp_repro.engine.messages import VALUE, VERSION, Layout, Layouts, numbered
from cdp_repro.engine.shards import Shards, Views
from cdp_repro.engine.transfers import Outgoing, Transfer
from cdp_repro.schedule import Program, Value
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.transport import Communicator, Edge, directions
from cdp_repro.schedule.values import BUFFERS, INPUT, LENT, OUTPUT_GRADIENT

_NUMBER_BYTES = 8
"""Bytes of the version number that travels with lent parameters; reported bytes do not include them."""


@dataclass(frozen=True)
class Pending:
    """A value that is not present yet: a message or collective brings it, or it is made when it is first read."""

    get: Callable[[], Any]
    """Waits for the value, or makes it."""


class Mailbox:
    """One rank's sends and receives. Between two ranks, messages arrive in the order in which they were sent."""

    def __init__(
        self,
        layouts: Layouts,
        shards: Sequence[Shards],
        groups: Mapping[Edge, dist.ProcessGroup],
        device: torch.device,
        kept_slots: int,
    ) -> None:
        """`shards` has one entry per stage if stages are sharded.

        A buffer that is sent is kept for `kept_slots` slots: by then the receiver must have come to the message.
        """
        self._layouts, self._shards, self._groups, self._device = layouts, shards, groups, device
        self._rank = dist.get_rank()
        self._kept_slots = kept_slots
        self._slot = 0
        self._outgoing = Outgoing()
        self._leaving: dict[Value, tuple[Tensor, set[int]]] = {}
        """For each value being sent: its buffer, and the parts that have not begun."""
        self._arriving: dict[Value, tuple[Tensor, set[int]]] = {}
        """The same for each value that arrives."""

    def let_go(self) -> None:
        """Begin a slot: let go of buffers whose send began more than `kept_slots` slots ago.

        Only slots in which this rank acts count, so that it never lets go too early.
        This only blocks if another rank is that far behind. It cannot cause a deadlock: no receive stands more than
        `kept_slots` slots after its send, so the rank furthest behind waits for receives that all ranks have posted.
        """
        self._slot += 1
        self._outgoing.let_go(before=self._slot - self._kept_slots)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._outgoing.flush()

    def send(self, value: Value, peer: int, content: Any) -> int:
        """Start to send a copy of a value, or of a part of it; return the bytes, without those of a version number.

        The first part makes the copy for all parts.
        """
        if value.whole not in self._leaving:
            packed = self._layout(value).pack(_as_message(content), self._device)
            self._leaving[value.whole] = packed, {*range(1, value.parts + 1)}
        buffer = _part(self._leaving, value)
        if len(buffer):
            group = self._groups[self._rank, peer]
            self._outgoing.append(Transfer.started(buffer, dist.isend(buffer, peer, group=group)), self._slot)
        return len(buffer) - (_NUMBER_BYTES if value.kind in LENT and len(buffer) else 0)

    def receive(self, value: Value, peer: int) -> Pending:
        """Post the receive of a message, or of a part of one; the first part brings the tensors of all parts."""
        layout, is_first = self._layout(value), value.whole not in self._arriving
        if is_first:
            whole = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            self._arriving[value.whole] = whole, {*range(1, value.parts + 1)}
        everything = self._arriving[value.whole][0]
        buffer = _part(self._arriving, value)
        works = [dist.irecv(buffer, peer, group=self._groups[peer, self._rank])] if len(buffer) else []
        transfer = Transfer.started(everything, *works)

        def arrived() -> Any:
            views = layout.views(transfer.wait())
            return self._content(value, views if is_first else {})

        return Pending(arrived)

    def join(self, value: Value, content: Any) -> tuple[Pending, int]:
        """Start this rank's part in the collective that makes `value`, with a copy of `content`.

        Returns the pending result, and the bytes of the whole value.
        """
        layout, tensors = self._layout(value), _as_message(content)
        number = {VERSION: tensors.pop(VERSION)} if VERSION in tensors else {}  # each rank knows the number
        views: Views = layout.views
        if not layout.nbytes:
            transfer = Transfer((), torch.empty(0, dtype=torch.uint8, device=self._device))
        elif value.kind in LENT:
            transfer, views = self._shards[value.stage].gather(tensors)
        else:
            layout.check(tensors)
            if value.parts > 1:
                transfer, views = self._shards[value.stage].reduce(tensors)
            else:
                buffer = layout.pack(tensors, self._device)
                works = [dist.all_reduce(values, async_op=True) for values in layout.values(buffer)]
                transfer = Transfer.started(buffer, *works)
        size = layout.nbytes - (_NUMBER_BYTES if number else 0)
        return Pending(lambda: self._content(value, views(transfer.wait()) | number)), size

    def _layout(self, value: Value) -> Layout:
        """Return the layout of a whole value."""
        return self._layouts[value.stage - 1 if value.kind == INPUT else value.stage][value.kind]

    def _content(self, value: Value, tensors: dict[str, Tensor]) -> Any:
        """Return the content of a message in the form in which the executor keeps the value."""
        if value.kind in (INPUT, *LENT):
            layouts = self._layout(value).tensors
            tensors = {name: tensor.requires_grad_(layouts[name].requires_grad) for name, tensor in tensors.items()}
        if value.kind in LENT:
            number = tensors.pop(VERSION, None)  # parameters without values do not travel
            return Version(value.version if number is None else int(number), tensors)
        if value.kind == BUFFERS:
            return {name: tensor.clone() for name, tensor in tensors.items()}  # not views of one buffer
        return tensors.get(VALUE) if value.kind in (INPUT, OUTPUT_GRADIENT) else tensors


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


def connect(program: Program, device: torch.device) -> dict[Edge, dist.ProcessGroup]:
    """Make the process groups of a program; return the group of each edge. All ranks must call it together.

    On gloo, edges in one direction share a group of all ranks. This is safe because gloo does not order the messages of
    different pairs. With one group, both directions together would only get the bandwidth of one. On NCCL, each
    communicator is initialised eagerly, by giving the group its device. Otherwise two ranks would build it at their
    first message, where each waits for the other.
    """
    return new_groups(program.communicators if device.type == "cuda" else directions(program.edges), device)


def new_groups(communicators: Sequence[Communicator], device: torch.device) -> dict[Edge, dist.ProcessGroup]:
    """Make a process group for each communicator; return the group of each edge. All ranks must call it together."""
    world = dist.group.WORLD
    assert world is not None, "the engine has checked that there is one"
    timeout = world._get_backend(device).options._timeout  # the default of a new group is 30 minutes
    gpu = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    found: dict[Edge, dist.ProcessGroup] = {}
    for edges in communicators:
        members = sorted({rank for edge in edges for rank in edge})
        is_member = dist.get_rank() in members
        group = dist.new_group(members if gpu else None, timeout=timeout, device_id=gpu if is_member else None)
        if isinstance(group, dist.ProcessGroup):
            found |= dict.fromkeys(edges, group)
    return found
