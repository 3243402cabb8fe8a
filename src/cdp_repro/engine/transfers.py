"""Transfers between ranks, and the buffers that must live until they are complete."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """Sends, receives or collectives that torch has started, with their buffer."""

    works: Sequence[dist.Work | None]
    buffer: Tensor
    source: Tensor | None = None
    """The buffer that a collective reads, if it is not `buffer`."""

    def wait(self) -> Tensor:
        """Wait for the transfer; return its buffer."""
        for work in self.works:
            assert work is not None, "every group has all ranks as members"
            work.wait()
        return self.buffer


class Outgoing:
    """This rank's transfers under way, oldest first, each with a number that tells when it began.

    A gloo send only counts as done once the sender has waited for it. So this waits for each send, but not before the
    receiver must have come to the message: then the wait ends at once.
    """

    def __init__(self) -> None:
        self._transfers: deque[tuple[int, Transfer]] = deque()

    def send(self, buffer: Tensor, rank: int, begun: int, group: dist.ProcessGroup | None, tag: int = 0) -> None:
        """Start to send a buffer to a rank; keep it until it is sent."""
        work = dist.isend(buffer, rank, group=group, tag=tag)
        self._transfers.append((begun, Transfer([work], buffer)))

    def let_go(self, before: float) -> None:
        """Wait until all transfers that began before `before` are complete; let go of their buffers."""
        while self._transfers and self._transfers[0][0] < before:
            self._transfers.popleft()[1].wait()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self.let_go(before=math.inf)
