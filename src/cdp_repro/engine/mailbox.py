"""Messages between ranks: sends that do not block, and receives that are posted before they are needed.

And collectives of all ranks, which do not block either: what they make arrives on each rank like a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.messages import Layouts
from cdp_repro.engine.shards import Shards, Views
from cdp_repro.engine.transfers import Outgoing, Transfer
from cdp_repro.schedule import Program, Value
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.transport import Communicator, Edge, directions
from cdp_repro.schedule.values import LENT, OUTPUT_GRADIENT

TAG_BYTES = 16
"""In front of lent parameters: the version that travels with them. Reported bytes are those of the parameters alone."""


@dataclass(frozen=True)
class Arrival:
    """What a message or collective will bring; a value of 0 bytes is there at once, as it is never sent."""

    transfer: Transfer | None
    buffer: Tensor
    views: Views
    tag: Tensor | None = None
    """The version that comes with parameters; None if nothing comes, and so none can be wrong."""

    def wait(self) -> tuple[dict[str, Tensor], int | None]:
        """Wait for it; return its tensors by name, and the version that came with parameters, else None."""
        if self.transfer is not None:
            self.transfer.wait()
        return self.views(self.buffer), None if self.tag is None else int(self.tag.view(torch.int64)[0])


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
        """`shards` are of each stage, if stages are sharded.

        What was sent is kept for `kept_slots` slots: by then its receiver must have come to the message.
        """
        self._layouts, self._shards, self._groups, self._device = layouts, shards, groups, device
        self._rank = dist.get_rank()
        self._kept_slots = kept_slots
        self._slot = 0
        self._outgoing = Outgoing()
        self._leaving: dict[Value, tuple[Tensor, set[int]]] = {}
        """What is being sent in parts: its buffer, and the parts that have not begun."""
        self._arriving: dict[Value, tuple[Tensor, set[int]]] = {}
        """The same of what arrives in parts."""

    def let_go(self) -> None:
        """Begin a slot: let go of what was sent a training step ago or earlier.

        That does not block unless another rank is as far behind. No ranks can so wait for each other: the one that is
        furthest behind has all that it needs under way.
        """
        self._slot += 1
        self._outgoing.let_go(before=self._slot - self._kept_slots)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._outgoing.flush()

    def send(self, value: Value, peer: int, tensors: Mapping[str, Tensor], version: int) -> int:
        """Start to send a copy of `tensors`, or of a part of them; return the bytes without a tag.

        The first part copies for all.
        """
        if value.whole not in self._leaving:
            self._leaving[value.whole] = self._packed(value, tensors, version), {*range(1, value.parts + 1)}
        buffer = _part(self._leaving, value)
        if len(buffer):
            group = self._groups[self._rank, peer]
            self._outgoing.append(Transfer.of(buffer, dist.isend(buffer, peer, group=group)), self._slot)
        return len(buffer) - self._tag_bytes(value)

    def receive(self, value: Value, peer: int) -> Arrival:
        """Get ready for a message, or for a part of one; the first part brings the tensors of all."""
        layout, tag_bytes = self._layouts.of(value), self._tag_bytes(value)
        is_first = value.whole not in self._arriving
        if is_first:
            whole = torch.empty(tag_bytes + layout.nbytes, dtype=torch.uint8, device=self._device)
            self._arriving[value.whole] = whole, {*range(1, value.parts + 1)}
        everything = self._arriving[value.whole][0]
        buffer = _part(self._arriving, value)
        transfer = None
        if len(buffer):
            transfer = Transfer.of(buffer, dist.irecv(buffer, peer, group=self._groups[peer, self._rank]))
        return Arrival(
            transfer,
            everything,
            lambda received: layout.views(received[tag_bytes:]) if is_first else {},
            everything[:tag_bytes] if tag_bytes else None,
        )

    def join(self, value: Value, tensors: Mapping[str, Tensor], version: int) -> tuple[Arrival, int]:
        """Start this rank's part in the collective that makes `value`, with copies of `tensors`.

        Returns what it will bring, and the bytes of the whole.
        """
        layout = self._layouts.of(value)
        if not layout.nbytes:
            return Arrival(None, torch.empty(0, dtype=torch.uint8, device=self._device), layout.views), 0
        if value.kind in LENT:
            transfer, views = self._shards[value.stage].gather(tensors)
            tag = torch.tensor([version], dtype=torch.int64, device=self._device)
            return Arrival(transfer, transfer.buffer, views, tag), layout.nbytes
        layout.check(tensors)
        if value.parts > 1:
            transfer, views = self._shards[value.stage].reduce(tensors)
            return Arrival(transfer, transfer.buffer, views), layout.nbytes
        buffer = layout.pack(tensors, self._device)
        works = [dist.all_reduce(values, async_op=True) for values in layout.values(buffer)]
        return Arrival(Transfer.of(buffer, *works), buffer, layout.views), layout.nbytes

    def requires_grad(self, value: Value) -> bool:
        """Whether a received input takes a gradient."""
        return bool(self._layouts.stages[value.stage - 1][OUTPUT_GRADIENT].tensors)

    def _packed(self, value: Value, tensors: Mapping[str, Tensor], version: int) -> Tensor:
        """Return a new buffer with copies of the tensors, and the version of lent parameters in front of them."""
        tag_bytes = self._tag_bytes(value)
        buffer = self._layouts.of(value).pack(tensors, self._device, tag_bytes)
        if tag_bytes:
            buffer[:tag_bytes].view(torch.int64).fill_(version)
        return buffer

    def _tag_bytes(self, value: Value) -> int:
        is_lent = value.kind in LENT
        return TAG_BYTES if is_lent and self._layouts.of(value).nbytes else 0


def _part(buffers: dict[Value, tuple[Tensor, set[int]]], value: Value) -> Tensor:
    """Return the part of its message's buffer that a value names; the last part takes the buffer out."""
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

    On gloo, edges in one direction share a group of all ranks: it has no order between messages of different pairs, and
    with one group both directions together would get the bandwidth of one. On NCCL each communicator is eager, a group
    that is told its device: else two ranks build it at their first message, and each waits there for the other.
    """
    if device.type == "cuda":
        return new_groups(program.communicators, device)
    return new_groups(directions(program.edges), device)


def new_groups(communicators: Sequence[Communicator], device: torch.device) -> dict[Edge, dist.ProcessGroup]:
    """Make a process group for each communicator; return the group of each edge. All ranks must call it together."""
    world = dist.group.WORLD
    assert world is not None, "the engine has checked that there is one"
    timeout = world._get_backend(device).options._timeout  # a new group would wait for 30 minutes
    gpu = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    found: dict[Edge, dist.ProcessGroup] = {}
    for edges in communicators:
        members = sorted({rank for edge in edges for rank in edge})
        is_member = dist.get_rank() in members
        group = dist.new_group(members if gpu else None, timeout=timeout, device_id=gpu if is_member else None)
        if isinstance(group, dist.ProcessGroup):
            found |= dict.fromkeys(edges, group)
    return found
