"""When a rank's messages start: each where it stands in the program, or many at once, as NCCL needs them.

A message without bytes is not sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.transfers import Outgoing, Transfer
from cdp_repro.schedule import RankProgram, Value
from cdp_repro.schedule.actions import Batch
from cdp_repro.schedule.transport import Edge, directions, ready

_POLL_SECONDS = 1e-4

Landing = Callable[[Value], tuple[Tensor, Tensor]]
"""Value -> the buffer of the whole value, and the part of it that the message fills."""


class AtOnce:
    """Each message starts where it stands in the program: gloo runs any number of them at a time.

    Edges in one direction share a group of all ranks. This is safe because gloo does not order the messages of
    different pairs. With one group, both directions together would only get the bandwidth of one.
    """

    def __init__(self, program: RankProgram, landing: Landing) -> None:
        """A sent buffer is kept for `Schedule.kept_slots` slots; the receiver must have come to the message by then."""
        self._landing = landing
        self._groups = groups_of_directions(program.edges)
        self._rank = program.rank
        self._kept_slots = program.schedule.kept_slots
        self._slot = 0
        self._outgoing = Outgoing()

    def begin(self, batches: Sequence[Batch]) -> None:  # noqa: ARG002 - messages are not in batches
        """Let go of buffers whose send began more than `kept_slots` slots ago.

        Only slots in which this rank acts count, so that it never lets go too early.
        This only blocks if another rank is that far behind. It cannot cause a deadlock: no receive stands more than
        `kept_slots` slots after its send, so the rank furthest behind waits for receives that all ranks have posted.
        """
        self._slot += 1
        self._outgoing.let_go(before=self._slot - self._kept_slots)

    def send(self, value: Value, peer: int, buffer: Tensor) -> None:  # noqa: ARG002 - one edge keeps its order
        """Send a value, or a part of one; the buffer is not written any more."""
        if len(buffer):
            self._outgoing.send(buffer, peer, self._slot, self._groups[self._rank, peer])

    def receive(self, value: Value, peer: int) -> Callable[[], Tensor]:
        """Get ready for a value; return the function that waits for it and returns the buffer of the whole value."""
        whole, buffer = self._landing(value)
        works = [dist.irecv(buffer, peer, group=self._groups[peer, self._rank])] if len(buffer) else []
        return Transfer(works, whole).wait

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._outgoing.flush()


class InBatches:
    """Messages start in the batches of `transport.batches`, each as soon as all that the rank sends in it is there.

    On a GPU, a message occupies a kernel until its other end runs, too. CUDA does not promise that two kernels ever run
    at the same time, whatever their streams, and may wait for all kernels before it loads a new one. So nothing here
    needs that: even if each rank ran one thing after the other, no two ranks would wait for each other. Where kernels
    do run side by side, messages overlap with compute.
    """

    def __init__(self, program: RankProgram, device: torch.device, landing: Landing) -> None:
        """All ranks must call it together."""
        self._landing = landing
        self._rank = program.rank
        self._kept_slots = program.schedule.kept_slots
        self._slot = 0
        self._due: deque[Batch] = deque()
        self._packed: dict[tuple[Value | None, int], Tensor] = {}
        """What waits for its batch, by value and destination."""
        self._landed: dict[tuple[Value, int], Transfer] = {}
        """What a batch has brought, or will bring, and nothing has read, by value and source."""
        self._under_way: deque[tuple[int, list[dist.Work], list[Tensor]]] = deque()
        """Batches, each with the slot in which it started and the buffers that must live until it is complete."""
        dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator, if it does not exist

    def begin(self, batches: Sequence[Batch]) -> None:
        """Take note of the batches of a slot; let go of the buffers of complete ones.

        Waits for batches of more than `kept_slots` slots ago, so that no rank is further ahead than on gloo. It only
        waits for ranks that far behind, which wait for nothing of this rank that has not started.
        """
        self._slot += 1
        while self._under_way and (self._is_complete() or self._under_way[0][0] < self._slot - self._kept_slots):
            while not self._is_complete():
                time.sleep(_POLL_SECONDS)
            self._let_go()
        self._due.extend(batches)
        self._start_ready()

    def send(self, value: Value, peer: int, buffer: Tensor) -> None:
        """See `AtOnce.send`."""
        self._packed[value, peer] = buffer
        self._start_ready()

    def receive(self, value: Value, peer: int) -> Callable[[], Tensor]:
        """See `AtOnce.receive`; the batch of the message may have started before, or start later."""
        return lambda: self._landed.pop((value, peer)).wait()

    def flush(self) -> None:
        """See `AtOnce.flush`."""
        assert not self._due, "each batch starts in its slot"
        while self._under_way:
            self._let_go()

    def _is_complete(self) -> bool:
        """Whether the oldest batch under way is complete."""
        return all(work.is_completed() for work in self._under_way[0][1])

    def _let_go(self) -> None:
        """Let go of the oldest batch under way."""
        _, works, _ = self._under_way.popleft()
        for work in works:
            work.wait()  # a failed one counts as complete; this raises its error

    def _start_ready(self) -> None:
        for batch in ready(self._due, lambda each: each.rank != self._rank or (each.value, each.peer) in self._packed):
            self._start(batch)

    def _start(self, batch: Batch) -> None:
        operations, arriving = [], {}
        start: Callable[..., dist.Work | None]
        for action in batch:
            assert action.value is not None
            if action.rank == self._rank:
                start, peer = dist.isend, action.peer
                buffer = self._packed.pop((action.value, peer))
            else:
                start, peer = dist.irecv, action.rank
                arriving[action.value, peer], buffer = self._landing(action.value)
            if len(buffer):
                operations.append(dist.P2POp(start, buffer, peer))
        assert not arriving.keys() & self._landed.keys(), "a value is read before it comes again"
        works = dist.batch_isend_irecv(operations) if operations else []
        self._landed |= {key: Transfer(works, whole) for key, whole in arriving.items()}
        self._under_way.append((self._slot, works, [operation.tensor for operation in operations]))


def needs_batches(device: torch.device) -> bool:
    """Whether messages between such devices must be in batches: by NCCL."""
    return device.type == "cuda"


def groups_of_directions(edges: Sequence[Edge]) -> Mapping[Edge, dist.ProcessGroup]:
    """Make a gloo group of all ranks for each direction; return the group of each edge; all ranks call it together."""
    world = dist.group.WORLD
    assert world is not None, "the engine has checked that there is one"
    timeout = world._get_backend(torch.device("cpu")).options._timeout  # the default of a new group is 30 minutes
    found: dict[Edge, dist.ProcessGroup] = {}
    for way in directions(edges):
        group = dist.new_group(timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        found |= dict.fromkeys(way, group)
    return found
