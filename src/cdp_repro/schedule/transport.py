"""Transport: the edges of a program, the batches in which ranks exchange messages on NCCL, and whether it could hang.

On NCCL a message occupies both of its GPUs until both have come to it, and nothing that is issued later is sure to run
before that. So NCCL's order is replayed as if each rank ran one thing after the other, in the order of issue, its
messages too. gloo has no such order: there, a rank may send first and receive later what another rank sends first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter

from cdp_repro.schedule.actions import Action, Batch, Op, Slot
from cdp_repro.schedule.values import Value

Edge = tuple[int, int]
"""Source and destination."""


def edges(slots: Iterable[Slot], later: Callable[[int], int] | None = None) -> list[Edge]:
    """Return the directed edges over which a program sends, sorted.

    `later` maps each rank to the one that plays its role a training step later; None if each keeps its own. A longer
    run uses the edges of all roles in turn. For example, where stage 0 of model_parallel takes turns on 6 ranks and
    stage 1 on 5, all 30 edges between them are used, but not within the first 4 steps of 6 micro-batches.
    """
    found: set[Edge] = set()
    for edge in {action.edge for slot in slots for action in slot.actions}:
        while edge is not None and edge not in found:
            found.add(edge)
            edge = edge if later is None else (later(edge[0]), later(edge[1]))
    return sorted(found)


def directions(used: Sequence[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """Return the edges to higher ranks, and those to lower ones, without empty groups."""
    ways = (tuple(edge for edge in used if (edge[0] < edge[1]) is rises) for rises in (True, False))
    return tuple(filter(None, ways))


def batches(slot: Slot) -> dict[int, list[Batch]]:
    """Return, by rank, the messages that are sent in a slot, in the batches in which the rank exchanges them.

    A batch has the messages of one level. The level of a message is the number of things that its sender does before it
    in the slot, or more, if the sender reads a message of the slot before: then it is above the level of that one. So a
    rank that has sent all it sends up to a level waits for nothing above it, and no two ranks wait for each other.

    `slot` has the actions of all ranks, in an order in which one process could run them.
    """
    level: Counter[int] = Counter()
    """By rank: of a message that it would send now."""
    level_of: dict[tuple[int, Value | None], int] = {}
    """By destination and value."""
    found: defaultdict[int, defaultdict[int, list[Action]]] = defaultdict(lambda: defaultdict(list))
    for action in slot.actions:
        rank = action.rank
        read = (level_of[rank, value] + 1 for value in action.reads if (rank, value) in level_of)
        level[rank] = max(level[rank], *read, 0)
        if action.op is Op.SEND:
            level_of[action.peer, action.value] = level[rank]
            for end in (rank, action.peer):
                found[end][level[rank]].append(action)
        elif action.op is not Op.RECEIVE:
            level[rank] += 1
    return {rank: [tuple(levels[each]) for each in sorted(levels)] for rank, levels in found.items()}


def blocked_on_nccl(slots: Iterable[Slot]) -> Action | None:
    """Return an action of a checked run that would wait for ever on NCCL, as part of a cycle of waits; else None.

    A rank begins something when what it issued before has ended. A batch ends when all its messages have begun at their
    other ends, and a collective when all ranks have begun it.
    """
    waits: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    """Of moments: (rank, k) is when the rank has ended k things, and begins the next."""
    action_of: dict[tuple[int, int], Action] = {}
    issued: Counter[int] = Counter()
    come_to: Counter[Hashable] = Counter()
    meetings: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    """For each message and each collective: the moments at which ranks come to it."""
    for rank, things in _issued(slots):
        begin = rank, issued[rank]
        issued[rank] += 1
        waits.add((rank, issued[rank]), begin)
        for action in things:
            action_of[begin] = action
            if action.op in (Op.SEND, Op.COLLECTIVE):
                met = action if action.op is Op.SEND else Op.COLLECTIVE  # all ranks join collectives in one order
                come_to[rank, met] += 1  # the same set of buffers travels again and again
                meetings[met, come_to[rank, met]].append(begin)
    for meeting in meetings.values():
        for rank, place in meeting:
            waits.add((rank, place + 1), *meeting)
    try:
        waits.prepare()
    except CycleError as error:
        return action_of[error.args[1][0]]
    return None


def ready(due: deque[Batch], is_here: Callable[[Action], bool]) -> Iterator[Batch]:
    """Take batches from `due`, in order, as long as `is_here` holds for each message: made, or of another rank."""
    while due and all(map(is_here, due[0])):
        yield due.popleft()


def _issued(slots: Iterable[Slot]) -> Iterator[tuple[int, Batch]]:
    """Yield what ranks issue, for each rank in its order: batches, and actions that are no messages."""
    for slot in slots:
        due = {rank: deque(found) for rank, found in batches(slot).items()}
        made: set[Action] = set()
        for rank in due:
            yield from ((rank, batch) for batch in _ready_on(rank, due, made))
        for action in slot.actions:
            if action.op is Op.SEND:
                made.add(action)
                yield from ((action.rank, batch) for batch in _ready_on(action.rank, due, made))
            elif action.op is not Op.RECEIVE:
                yield action.rank, (action,)


def _ready_on(rank: int, due: Mapping[int, deque[Batch]], made: Set[Action]) -> Iterator[Batch]:
    return ready(due[rank], lambda message: message.rank != rank or message in made)
