"""The ranks that run one schedule together: the number of this one, and what they tell each other between two runs.

On a single device the team is this process alone, and every exchange is with itself.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from cdp_repro.launch import control_messages
from cdp_repro.launch.failures import StalledError, is_lost_peer
from cdp_repro.launch.positions import Positions

T = TypeVar("T")
_CLOCK_TAG = 2
_ONE_AT_A_TIME = Lock()
"""Held by the team of several ranks in whose run this process is."""
_FAILED: WeakSet[dist.ProcessGroup] = WeakSet()
"""Process groups in which a run of this process has failed."""


class Team:
    """The process group, seen from one rank. All ranks must make it, and call `gather`, `share` and `clock_offset`,
    together.

    Args:
        size: number of ranks needed.
        device: where the tensors of this rank are.
        wanted_by: what needs this many ranks, for the error message.

    Raises:
        ValueError: the number of processes is not `size`.
        RuntimeError: a run in these processes has failed.
    """

    def __init__(self, size: int, device: torch.device, wanted_by: str) -> None:
        self.device = device
        self.size = size
        present = dist.get_world_size() if dist.is_initialized() else 1
        if present != self.size:
            raise ValueError(
                f"{wanted_by} runs on {size} processes, not on {present}: start {size}, e.g. by "
                f"torchrun --nproc-per-node={size}, and call init_process_group in each"
            )
        if self.size > 1 and dist.group.WORLD in _FAILED:
            raise RuntimeError(
                "a run of this process group has failed, and its messages may still be under way, which a new engine "
                "would take for its own: start new processes, or call destroy_process_group and init_process_group"
            )
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.control = self._control_group() if self.size > 1 else None
        """A group for plain values and small tensors on the CPU; None if there is only one rank."""
        self._store = self._own_store() if self.size > 1 else None
        self.positions = Positions(_store_of_all() if self.size > 1 else None, self.size, self.rank)

    @staticmethod
    def _control_group() -> dist.ProcessGroup:
        if dist.get_backend() == "gloo":
            world = dist.group.WORLD
            assert world is not None
            return world
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        return group

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on rank 0; on others an empty list.

        A value is numbers, texts, tensors, or dicts, lists and tuples of them; tensors of other ranks are on the CPU.
        """
        return [value] if self.size == 1 else control_messages.gather(value, self.control)

    def share(self, value: T) -> T:
        """Return the value of rank 0, which must be one that `gather` takes."""
        shared: T = value if self.size == 1 else control_messages.share(value, self.control)
        return shared

    def clock_offset(self) -> float:
        """Return the seconds to add to this rank's `time.perf_counter` to get that of rank 0.

        On one machine they are the same clock; across machines, the fastest of a few round trips bounds the error by
        half its time.
        """
        offset, machines = 0.0, self.share(self.gather(_machine()))
        for rank in range(1, self.size):
            if self.rank in (0, rank) and machines[rank] != machines[0]:
                trips = [self._round_trip(rank) for _ in range(5)]
                offset = min(trips)[1]
        return offset

    def _round_trip(self, rank: int) -> tuple[float, float]:
        """Let `rank` ask rank 0 for its time; return the seconds that took, and the clocks' offset."""
        now = torch.zeros(1, dtype=torch.float64)
        if self.rank == 0:
            dist.recv(now, rank, group=self.control, tag=_CLOCK_TAG)
            dist.send(now.fill_(time.perf_counter()), rank, group=self.control, tag=_CLOCK_TAG)
            return 0.0, 0.0
        begin = time.perf_counter()
        dist.send(now, 0, group=self.control, tag=_CLOCK_TAG)
        dist.recv(now, 0, group=self.control, tag=_CLOCK_TAG)
        end = time.perf_counter()
        return end - begin, now.item() - (begin + end) / 2

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for another."""
        world = dist.group.WORLD
        assert world is not None, "asked only where there are several ranks"
        seconds: float = world._get_backend(self.device).options._timeout.total_seconds()
        return seconds

    @property
    def store(self) -> Store:
        """Keys and values of this team that all its ranks see at any time; only where there are several ranks."""
        assert self._store is not None, "asked only where there are several ranks"
        return self._store

    @contextmanager
    def running_alone(self) -> Iterator[None]:
        """Run the body unless this process is in the body of another team: two would wait for each other's ranks.

        Raises:
            RuntimeError: it is.
        """
        if self._store is None:
            yield
            return
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise RuntimeError(
                "another engine of this process is in the middle of a run: exhaust or close its iterator first, as "
                "ranks whose messages are of two runs at once may wait for each other for ever"
            )
        try:
            yield
        finally:
            _ONE_AT_A_TIME.release()

    def give_up(self, error: BaseException, has_sent: bool) -> None:
        """Tell other ranks why this one does not go on; if it `has_sent` messages, no new team may use the group."""
        self.positions.give_up(error)
        if self.size > 1 and has_sent:
            assert dist.group.WORLD is not None
            _FAILED.add(dist.group.WORLD)

    @contextmanager
    def naming_stalled(self) -> Iterator[None]:
        """Turn an error from waiting for other ranks in vain into one that names the ranks that stall.

        Raises:
            StalledError: Other ranks do not answer.
        """
        try:
            yield
        except StalledError:
            raise
        except (RuntimeError, OSError) as error:
            if self.size == 1 or not is_lost_peer(error):
                raise
            raise self.positions.stalled(error) from error

    def _own_store(self) -> Store:
        """Return a store for this team alone, without what ranks wrote for an earlier one in the same process.

        All ranks make the same teams in the same order, so each rank's own count gives the same number.
        """
        shared = PrefixStore("cdp_repro", dist.distributed_c10d._get_default_store())
        return PrefixStore(f"team/{shared.add(f'teams/{self.rank}', 1)}", shared)


def _machine() -> str:
    """Return a text that tells machines apart, not hosts that are containers or namespaces on one of them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else f"{platform.node()} {uuid.getnode()}"


def _store_of_all() -> Store:
    """Return the store at which the ranks have met: without the prefixes of torch, as the launching process has it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
