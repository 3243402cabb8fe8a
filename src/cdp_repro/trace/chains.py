"""The longest chain of messages in a slot, each of which has to wait for the one before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.rings import collective_name, ring_hops
from cdp_repro.schedule.values import Value


def longest_chain(actions: Iterable[Action], is_sent: Callable[[Action], bool], ranks: int) -> int:
    """Return the longest chain among the messages of one slot.

    A message waits for everything that its sender has waited for before, in the order of the sender's actions; a
    collective waits for everything that any rank has waited for. `is_sent` tells whether a SEND or COLLECTIVE has any
    bytes. For example, the chain is 2 if rank 1 adds to a value from rank 0 and sends the sum to rank 2.
    """
    programs: dict[int, list[Action]] = defaultdict(list)
    for action in actions:
        programs[action.rank].append(action)
    sends = [a for own in programs.values() for a in own if a.op is Op.SEND and is_sent(a)]
    joined = (a for own in programs.values() for a in own if a.op is Op.COLLECTIVE and is_sent(a))
    parts: Counter[object] = Counter(collective_name(_key(a.value)) for a in joined)
    search = _Search(programs, {(a.peer, _key(a.value)) for a in sends}, parts, is_sent, ranks)
    return search.run()


class _Search:
    """Runs the actions of all ranks in an order in which nothing waits for a later action."""

    def __init__(
        self,
        programs: dict[int, list[Action]],
        coming: set[tuple[int, Value]],
        parts: Counter[object],
        is_sent: Callable[[Action], bool],
        ranks: int,
    ) -> None:
        """`coming` has the values that messages bring in this slot; `parts` counts the actions of each collective."""
        self._programs = programs
        self._coming = coming
        self._parts = parts
        self._is_sent = is_sent
        self._ranks = ranks
        self._depth: dict[tuple[int, Value], int] = {}
        """By rank and value: the number of consecutive messages that brought it."""
        self._waited: dict[int, int] = defaultdict(int)
        self._joined: dict[object, list[Action]] = defaultdict(list)

    def run(self) -> int:
        places = dict.fromkeys(self._programs, 0)
        progressed = True
        while progressed:
            progressed = False
            for rank, own in self._programs.items():
                while places[rank] < len(own) and self._step(own[places[rank]]):
                    places[rank] += 1
                    progressed = True
        return max(self._depth.values(), default=0)

    def _step(self, action: Action) -> bool:
        """Run an action; return False if a value that it reads has not come."""
        rank = action.rank
        for value in action.reads:
            key = rank, value
            if key in self._depth:
                self._waited[rank] = max(self._waited[rank], self._depth[key])
            elif key in self._coming:
                return False
        if action.op is Op.SEND and self._is_sent(action):
            self._depth[action.peer, _key(action.value)] = self._waited[rank] + 1
        elif action.op is Op.COLLECTIVE and self._is_sent(action):
            name = collective_name(_key(action.value))
            self._coming.add((rank, _key(action.value)))
            self._joined[name].append(action)
            if len(self._joined[name]) == self._parts[name]:
                reached = max(self._waited[part.rank] for part in self._joined[name]) + ring_hops(action, self._ranks)
                self._depth |= {(part.rank, _key(part.value)): reached for part in self._joined[name]}
        return True


def _key(value: Value | None) -> Value:
    assert value is not None
    return value
