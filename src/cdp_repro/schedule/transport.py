"""Transport: which ranks send to which, over how few communicators, and whether NCCL could hang.

NCCL's order, as the replay has it: the messages of a rank on one communicator run one after the other in the order in
which they were issued, and each starts only when the compute that was issued before it is done. A message runs when
both of its ends can start. Compute waits for the messages that it reads. gloo has no such order between messages, so
that a program which gloo runs may hang on NCCL: with one communicator for each direction, data parallelism by ordered
messages does from three ranks on. With one for each edge nothing that `check` accepts can.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.values import Value

Edge = tuple[int, int]
"""Source and destination."""
Communicator = tuple[Edge, ...]
"""The edges whose messages it carries."""


def edges(slots: Iterable[Slot], later: Callable[[int], int] | None = None) -> list[Edge]:
    """Return the directed edges over which a program sends, sorted.

    `later` maps each rank to the one that plays its role a training step later, None if each keeps its own: a longer
    run uses the edges of all roles in turn.
    """
    used = {(a.rank, a.peer) for slot in slots for a in slot.actions if a.op is Op.SEND}
    return sorted(used) if later is None else _in_all_roles(used, later)


def directions(used: Iterable[Edge]) -> tuple[Communicator, ...]:
    """Return two communicators: all edges to higher ranks, and all to lower ones."""
    up: list[Edge] = []
    down: list[Edge] = []
    for source, destination in used:
        (up if source < destination else down).append((source, destination))
    return tuple(tuple(each) for each in (up, down) if each)


def communicators(
    slots: Sequence[Slot], ranks: int, later: Callable[[int], int] | None = None
) -> tuple[Communicator, ...]:
    """Return the communicators for a run: one for each direction if the replay allows that, else one for each edge.

    A communicator costs memory and start-up time on each of its ranks. `later` as for `edges`.
    """
    used = edges(slots, later)
    shared = directions(used)
    if blocked_on_nccl(slots, ranks, shared) is None:
        return shared
    return tuple((edge,) for edge in used)


def _in_all_roles(used: Iterable[Edge], later: Callable[[int], int]) -> list[Edge]:
    """Return these edges and those that take their place in any later training step, sorted.

    For example stage 0 of model_parallel takes turns on 6 ranks and stage 1 on 5, so that all 30 edges between them are
    used, but not by the first 4 steps of 6 micro-batches.
    """
    found: set[Edge] = set()
    for source, destination in used:
        while (source, destination) not in found:
            found.add((source, destination))
            source, destination = later(source), later(destination)
    return sorted(found)


def blocked_on_nccl(slots: Iterable[Slot], ranks: int, shared: Sequence[Communicator]) -> Action | None:
    """Return an action that would wait for ever on NCCL, or None: a replay of a run in NCCL's order.

    Receives are posted where they stand in the program, as the executor does.
    """
    communicator_of = {edge: number for number, each in enumerate(shared) for edge in each}
    replay = _Replay(ranks, lambda edge: communicator_of[edge])
    for slot in slots:
        for action in slot.actions:
            replay.issue(action)
    return replay.run()


class _Replay:
    """Each rank's stream of compute, and its queues of messages on each communicator."""

    def __init__(self, ranks: int, communicator_of: Callable[[Edge], Hashable]) -> None:
        self._communicator_of = communicator_of
        self._compute: list[deque[tuple[Action, list[int]]]] = [deque() for _ in range(ranks)]
        """By rank: what has not run, with the messages that it waits for."""
        self._issued = [0] * ranks
        self._finished = [0] * ranks
        """By rank: compute that was issued, and that has run."""
        self._queues: list[dict[Hashable, deque[tuple[int, int, Action]]]] = [defaultdict(deque) for _ in range(ranks)]
        """By rank and communicator: (message, compute issued before it, action)."""
        self._arriving: list[dict[Value, int]] = [{} for _ in range(ranks)]
        """By rank: the message that brings a value."""
        self._numbers: dict[tuple[Op, Edge], int] = defaultdict(int)
        self._messages: dict[tuple[Edge | str, int], int] = {}
        self._collectives = [0] * ranks
        self._ends: dict[int, int] = {}
        """By message: how many ranks take part."""
        self._started: dict[int, set[int]] = defaultdict(set)
        self._done: set[int] = set()

    def issue(self, action: Action) -> None:
        """Enter the next action of a rank."""
        rank = action.rank
        waits = [self._arriving[rank].pop(value) for value in action.reads if value in self._arriving[rank]]
        if action.op is not Op.RECEIVE:  # a send copies what it sends, which is compute, too
            self._compute[rank].append((action, waits))
            self._issued[rank] += 1
        if action.op.is_message:
            edge = (rank, action.peer) if action.op is Op.SEND else (action.peer, rank)
            number = self._enqueue(action, self._communicator_of(edge), (edge, self._count((action.op, edge))), 2)
        elif action.op is Op.COLLECTIVE:
            self._collectives[rank] += 1
            number = self._enqueue(action, "all", ("all", self._collectives[rank]), len(self._issued))
        if action.op in (Op.RECEIVE, Op.COLLECTIVE):
            self._arriving[rank] |= dict.fromkeys(action.writes, number)

    def _count(self, key: tuple[Op, Edge]) -> int:
        self._numbers[key] += 1
        return self._numbers[key]

    def _enqueue(self, action: Action, communicator: Hashable, key: tuple[Edge | str, int], ends: int) -> int:
        number = self._messages.setdefault(key, len(self._messages))
        self._ends[number] = ends
        self._queues[action.rank][communicator].append((number, self._issued[action.rank], action))
        return number

    def run(self) -> Action | None:
        """Run all that can run; return the first action that cannot, or None."""
        ready = deque(range(len(self._issued)))
        while ready:
            rank = ready.popleft()
            progressed = self._advance_compute(rank)
            for queue in self._queues[rank].values():
                while queue and (queue[0][0] in self._done or self._start(rank, queue[0])):
                    progressed = True
                    number, _, action = queue.popleft()
                    if action.peer >= 0:
                        ready.append(action.peer)
                    else:
                        ready.extend(range(len(self._issued)))
                    self._done.add(number)
            if progressed:
                ready.append(rank)
        stuck = [queue[0] for queues in self._queues for queue in queues.values() if queue]
        waiting = [compute[0][0] for compute in self._compute if compute]
        return stuck[0][2] if stuck else waiting[0] if waiting else None

    def _advance_compute(self, rank: int) -> bool:
        compute, before = self._compute[rank], self._finished[rank]
        while compute and all(number in self._done for number in compute[0][1]):
            compute.popleft()
            self._finished[rank] += 1
        return self._finished[rank] > before

    def _start(self, rank: int, head: tuple[int, int, Action]) -> bool:
        """Start a rank's end of the message at the head of a queue; return whether all ends have started."""
        number, issued_before, _ = head
        if self._finished[rank] < issued_before:
            return False
        self._started[number].add(rank)
        return len(self._started[number]) == self._ends[number]
