"""Messages between ranks: sends that do not block, and receives that are posted before they are needed.

And collectives of all ranks, which do not block either: their result is a message to each of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.layouts import Layout, StageLayouts
from cdp_repro.engine.shards import Shards, Views
from cdp_repro.engine.transfers import Outgoing, Transfer
from cdp_repro.schedule import Action, MessageKey, Payload, part_of, result_of


class Mailbox:
    """One rank's sends and receives. Between two ranks, messages arrive in the order in which they were sent.

    A message without bytes (gradients of a stage without parameters) is neither sent nor awaited.
    """

    def __init__(
        self, layouts: Sequence[StageLayouts], shards: Sequence[Shards], micro_batches: int, device: torch.device
    ) -> None:
        """`shards` are of each stage, if stages are sharded; `micro_batches` is M, those of a training step."""
        self._layouts = layouts
        self._shards = shards
        self._slot = 0
        self._micro_batches = micro_batches
        self._device = device
        self._rank = dist.get_rank()
        self._groups = directions(device)
        self._expected: dict[MessageKey, deque[tuple[Transfer, Views]]] = defaultdict(deque)
        self._outgoing = Outgoing()
        self._leaving: dict[MessageKey, Tensor] = {}
        """What is being sent in parts, until the last has begun."""
        self._arriving: dict[MessageKey, Tensor] = {}
        """Where what is sent in parts arrives, until the last has been announced."""

    def enter(self, slot: int) -> None:
        """Begin a slot: let go of what was sent a training step ago or earlier.

        That does not block unless another rank is as far behind. No ranks can so wait for each other: the one that is
        furthest behind has all that it needs under way.
        """
        self._slot = slot
        self._outgoing.let_go(before=slot - 2 * len(self._layouts))

    def send(self, action: Action, tensors: Mapping[str, Tensor]) -> int:
        """Start to send copies of `tensors`, the payload of a SEND, or a part of them; return the bytes of that.

        The first part copies for all.
        """
        message = _whole(action)
        if action.part in (None, 1):
            self._leaving[message] = self._layout(message).pack(tensors, self._device)
        buffer = _part_of(self._leaving, action)
        if len(buffer):
            group = self._groups[action.peer > self._rank]  # type: ignore[operator]  # messages have a peer
            self._outgoing.append(Transfer.of(buffer, dist.isend(buffer, action.peer, group=group)), self._slot)
        return len(buffer)

    def post(self, action: Action) -> None:
        """Get ready to receive the message of a RECEIVE, or a part of it; the first brings the tensors of all."""
        message, is_first = _whole(action), action.part in (None, 1)
        layout = self._layout(message)
        if is_first:
            self._arriving[message] = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        everything = self._arriving[message]
        buffer = _part_of(self._arriving, action)
        if len(buffer):
            group = self._groups[action.peer < self._rank]  # type: ignore[operator]  # messages have a peer
            received = Transfer.of(buffer, dist.irecv(buffer, action.peer, group=group))
            self._expected[action.message].append((received, lambda _: layout.views(everything) if is_first else {}))

    def join(self, action: Action, tensors: Mapping[str, Tensor]) -> int:
        """Start this rank's part in a COLLECTIVE, to which it brings copies of `tensors`; return the bytes of all."""
        layout = self._layout(action.message)
        if not layout.nbytes:
            return 0
        if action.payload is Payload.PARAMETERS:
            started = self._shards[action.stage].gather(tensors)
        elif action.payload is Payload.GRADIENTS:
            layout.check(tensors)
            started = self._shards[action.stage].reduce(tensors)
        else:
            buffer = layout.pack(tensors, self._device)
            works = (dist.all_reduce(values, async_op=True) for values in layout.values(buffer))
            started = Transfer.of(buffer, *works), layout.views
        self._expected[result_of(action, self._micro_batches)].append(started)
        return layout.nbytes

    def take(self, key: MessageKey) -> dict[str, Tensor] | None:
        """Wait for what a RECEIVE or a COLLECTIVE has announced; return its tensors by name, or None without one."""
        if not self._expected.get(key):
            return None
        transfer, views = self._expected[key].popleft()
        if not self._expected[key]:
            del self._expected[key]
        return views(transfer.wait())

    def announced(self) -> list[MessageKey]:
        """Return what was announced and not taken yet."""
        return [*self._expected]

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._outgoing.flush()

    def requires_grad(self, stage: int) -> bool:
        """Whether the activations that `stage` sends take a gradient."""
        return self._layouts[stage].output_requires_grad

    def _layout(self, key: MessageKey) -> Layout:
        return self._layouts[key[1]].by_payload[key[0]]


def _whole(action: Action) -> MessageKey:
    """Return the message that the one of `action` is, or is a part of."""
    payload, stage, micro_batch, version, _ = action.message
    return payload, stage, micro_batch, version, None


def _part_of(buffers: dict[MessageKey, Tensor], action: Action) -> Tensor:
    """Return the part of its message's buffer that `action` names; the last takes the buffer out."""
    message = _whole(action)
    buffer = buffers[message]
    if action.part in (None, action.parts):
        del buffers[message]
    if action.part is None:
        return buffer
    inside = part_of(len(buffer), action.part, action.parts)
    return buffer[inside.start : inside.stop]


def directions(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups for messages to lower and to higher ranks, which wait as long as the world's group does.

    One group moves the messages between two ranks one after the other, whatever their direction: with NCCL two could
    wait for each other, with gloo both directions together get the bandwidth of one. NCCL is told the device, or the
    first message between two ranks would wait in each for the other's.
    """
    world = dist.group.WORLD
    assert world is not None, "the engine has checked that there is one"
    timeout = world._get_backend(device).options._timeout  # a new group would wait for 30 minutes
    gpu = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    down, up = (dist.new_group(timeout=timeout, device_id=gpu) for _ in range(2))
    assert isinstance(down, dist.ProcessGroup) and isinstance(up, dist.ProcessGroup), "every rank is a member"
    return down, up
