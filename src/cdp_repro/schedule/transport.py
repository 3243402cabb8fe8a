"""Transport: the edges of a program, communicators that carry them, and whether NCCL could hang.

NCCL's order: the messages of a rank on one communicator run one after the other, in the order in which they were
issued. Each starts only when the compute issued before it is done. A message runs when both of its ends can start.
Compute waits for the messages that it reads. gloo has no such order, so a program that runs on gloo may hang on NCCL.
With one communicator per direction, programs hang that add sums around a ring of three or more ranks: data parallelism
by ordered messages with three or more workers (replicas counted), and other modes with three or more replicas. So does
`chimera` with four or more ranks. Most of these need two or three of another kind: around a ring of four ranks, every
other edge. With one per edge, no program that `check` accepts can hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from cdp_repro.schedule.actions import Action, Op, Slot

Edge = tuple[int, int]
"""Source and destination."""
Communicator = tuple[Edge, ...]
"""The edges whose messages the communicator carries."""


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


def directions(used: Sequence[Edge]) -> tuple[Communicator, ...]:
    """Return two communicators: all edges to higher ranks, and all to lower ones."""
    ways = (tuple(edge for edge in used if (edge[0] < edge[1]) is rises) for rises in (True, False))
    return tuple(filter(None, ways))


def merged(used: Sequence[Edge], hang: Callable[[Sequence[Communicator]], bool]) -> tuple[Communicator, ...]:
    """Return communicators of which no two could be one: each edge joins the first one with which nothing hangs.

    `hang` tells whether a program hangs with some communicators. With more sharing there are only more waits, so what
    hangs once hangs with every later edge, too.
    """
    found: list[Communicator] = []
    for number, edge in enumerate(used):
        alone = [(later,) for later in used[number + 1 :]]
        for place, communicator in enumerate(found):
            tried = [*found[:place], (*communicator, edge), *found[place + 1 :]]
            if not hang([*tried, *alone]):
                found = tried
                break
        else:
            found.append((edge,))
    return tuple(found)


def blocked_on_nccl(slots: Iterable[Slot], shared: Sequence[Communicator]) -> Action | None:
    """Return an action of a checked run that would wait for ever on NCCL, as part of a cycle of waits; else None.

    Receives are posted where they stand in the program, as in the executor.
    """
    communicator_of: dict[Hashable, object] = {edge: each for each in shared for edge in each} | {None: "all ranks"}
    waits: TopologicalSorter[Hashable] = TopologicalSorter()
    action_of: dict[Hashable, Action] = {}
    issued: Counter[Hashable] = Counter()
    last: dict[Hashable, Hashable] = {}
    """Last issued: by rank its compute, by rank and communicator a message, by rank and value the message with it."""

    def issue(action: Action, node: Hashable, *before: Hashable) -> None:
        waits.add(node, *(last[each] for each in before if each in last))
        action_of[node] = action

    for slot in slots:
        for action in slot.actions:
            op, rank, edge = action.op, action.rank, action.edge
            if op is not Op.RECEIVE:  # a send copies its value first, which is compute, too
                issued[rank] += 1
                compute = rank, issued[rank]
                issue(action, compute, rank, *((rank, value) for value in action.reads))
                last[rank] = compute
            if edge is not None or op is Op.COLLECTIVE:
                issued[rank, op, edge] += 1
                message, queue = (edge, issued[rank, op, edge]), (rank, communicator_of[edge])
                issue(action, message, rank, queue)
                last[queue] = message
                last |= dict.fromkeys(((rank, value) for value in action.writes), message)
    try:
        waits.prepare()
    except CycleError as error:
        return action_of[error.args[1][0]]
    return None
