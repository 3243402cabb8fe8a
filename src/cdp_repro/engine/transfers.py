"""What is on its way between ranks, in buffers that must live until it has arrived."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """What torch has started to send or receive, in its buffer."""

    works: Sequence[dist.Work]
    buffer: Tensor
    source: Tensor | None = None
    """Of a collective: the buffer that it reads, if that is another."""

    @classmethod
    def of(cls, buffer: Tensor, *works: dist.Work | None, source: Tensor | None = None) -> Transfer:
        """Return what torch has started; it starts nothing (None) only where a rank is no member of a group."""
        started = [work for work in works if work is not None]
        assert len(started) == len(works), "the process group is the world's, so every rank is a member"
        return cls(started, buffer, source)

    def wait(self) -> Tensor:
        """Wait for it; return the buffer."""
        for work in self.works:
            work.wait()
        return self.buffer


class Outgoing:
    """What this rank is sending, oldest first, each with a number that tells when it began.

    A send of gloo is done only for who has waited for it. So it is waited for, but not before the receiver must have
    come to the message, which is then there at once.
    """

    def __init__(self) -> None:
        self._transfers: deque[tuple[int, Transfer]] = deque()

    def append(self, transfer: Transfer, begun: int) -> None:
        """Keep a buffer until it has been sent."""
        self._transfers.append((begun, transfer))

    def let_go(self, before: float) -> None:
        """Wait until what has begun before that has been sent; let go of its buffers."""
        while self._transfers and self._transfers[0][0] < before:
            self._transfers.popleft()[1].wait()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self.let_go(before=math.inf)
