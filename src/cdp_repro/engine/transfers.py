"""What is on its way between ranks, in buffers that must live until it has arrived."""

from __future__ import annotations

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

    @classmethod
    def of(cls, buffer: Tensor, *works: dist.Work | None) -> Transfer:
        """Return what torch has started; it starts nothing (None) only where a rank is no member of a group."""
        started = [work for work in works if work is not None]
        assert len(started) == len(works), "the process group is the world's, so every rank is a member"
        return cls(started, buffer)

    @property
    def is_done(self) -> bool:
        """Whether all has arrived, or is on its way without the buffer."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Tensor:
        """Wait for it; return the buffer."""
        for work in self.works:
            work.wait()
        return self.buffer


class Outgoing:
    """What this rank is sending, oldest first."""

    def __init__(self) -> None:
        self._transfers: deque[Transfer] = deque()

    def append(self, transfer: Transfer) -> None:
        """Keep a buffer until it has been sent; let go of those that have been."""
        self._transfers.append(transfer)
        while self._transfers and self._transfers[0].is_done:
            self._transfers.popleft()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._transfers:
            self._transfers.popleft().wait()
