"""Messages between ranks: sends that do not block, and receives that are posted before they are needed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.layouts import Layout, StageLayouts
from cdp_repro.schedule import Action, MessageKey


class Mailbox:
    """One rank's sends and receives. Between two ranks, messages arrive in the order in which they were sent.

    A message without bytes (gradients of a stage without parameters) is neither sent nor awaited.
    """

    def __init__(self, layouts: Sequence[StageLayouts], device: torch.device) -> None:
        self._layouts = layouts
        self._device = device
        self._rank = dist.get_rank()
        self._groups = directions(device)
        self._expected: dict[MessageKey, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._outgoing: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, action: Action, tensors: Mapping[str, Tensor]) -> int:
        """Start to send copies of `tensors`, the payload of a SEND; return their bytes."""
        layout = self._layout(action.message)
        if layout.nbytes:
            buffer = layout.pack(tensors, self._device)
            group = self._groups[action.peer > self._rank]  # type: ignore[operator]  # messages have a peer
            self._outgoing.append((_started(dist.isend(buffer, action.peer, group=group)), buffer))
            self._reap()
        return layout.nbytes

    def post(self, action: Action) -> None:
        """Get ready to receive the message of a RECEIVE."""
        layout = self._layout(action.message)
        if layout.nbytes:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            group = self._groups[action.peer < self._rank]  # type: ignore[operator]  # messages have a peer
            self._expected[action.message].append((_started(dist.irecv(buffer, action.peer, group=group)), buffer))

    def take(self, key: MessageKey) -> dict[str, Tensor] | None:
        """Wait for a message that a RECEIVE has announced; return its tensors by name, or None without one."""
        if not self._expected.get(key):
            return None
        work, buffer = self._expected[key].popleft()
        if not self._expected[key]:
            del self._expected[key]
        work.wait()
        return self._layout(key).views(buffer)

    def announced(self) -> list[MessageKey]:
        """Return the messages that were announced and not taken yet."""
        return [*self._expected]

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._outgoing:
            self._outgoing.popleft()[0].wait()

    def requires_grad(self, stage: int) -> bool:
        """Whether the activations that `stage` sends take a gradient."""
        return self._layouts[stage].output_requires_grad

    def _layout(self, key: MessageKey) -> Layout:
        return self._layouts[key[1]].by_payload[key[0]]

    def _reap(self) -> None:
        """Let go of the buffers that have been sent."""
        while self._outgoing and self._outgoing[0][0].is_completed():
            self._outgoing.popleft()


def directions(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups for messages to lower and to higher ranks, which wait as long as the world's group does.

    One group moves the messages between two ranks one after the other, whatever their direction: with NCCL two could
    wait for each other, with gloo both directions together get the bandwidth of one.
    """
    world = dist.group.WORLD
    assert world is not None, "the engine has checked that there is one"
    timeout = world._get_backend(device).options._timeout  # a new group would wait for 30 minutes
    down, up = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    assert isinstance(down, dist.ProcessGroup) and isinstance(up, dist.ProcessGroup), "every rank is a member"
    return down, up


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "the process group is the world's, so every rank is a member"
    return work
