"""The longest chain of messages in a slot, each of which has to wait for the one before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.values import Value, collective_name
from cdp_repro.trace.rings import ring_hops


def longest_chain(actions: Sequence[Action], is_sent: Callable[[Action], bool], ranks: int) -> int:
    """Return the longest chain among the messages of one slot.

    A message waits for everything that its sender has waited for before, in the order of the sender's actions; a
    collective waits for everything that any rank has waited for. `is_sent` tells whether a SEND or COLLECTIVE has any
    bytes. For example, the chain is 2 if rank 1 adds to a value from rank 0 and sends the sum to rank 2.
    """
    programs: dict[int, list[Action]] = defaultdict(list)
    for action in actions:
        programs[action.rank].append(action)
    sent = [action for action in actions if action.op in (Op.SEND, Op.COLLECTIVE) and is_sent(action)]
    coming = {(each.peer, _present(each.value)) for each in sent if each.op is Op.SEND}
    parts = Counter[object](collective_name(_present(each.value)) for each in sent if each.op is Op.COLLECTIVE)
    return _Search(programs, coming, parts, is_sent, ranks).run()


@dataclass
class _Search:
    """Runs the actions of all ranks in an order in which nothing waits for a later action."""

    programs: dict[int, list[Action]]
    coming: set[tuple[int, Value]]
    """The values that messages bring in this slot, by rank."""
    parts: Counter[object]
    """How many actions each collective has."""
    is_sent: Callable[[Action], bool]
    ranks: int
    depth: dict[tuple[int, Value], int] = field(default_factory=dict)
    """By rank and value: the number of consecutive messages that brought it."""
    waited: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    joined: dict[object, list[Action]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> int:
        places = dict.fromkeys(self.programs, 0)
        progressed = True
        while progressed:
            progressed = False
            for rank, own in self.programs.items():
                while places[rank] < len(own) and self._step(own[places[rank]]):
                    places[rank] += 1
                    progressed = True
        return max(self.depth.values(), default=0)

    def _step(self, action: Action) -> bool:
        """Run an action; return False if a value that it reads has not come."""
        rank = action.rank
        for value in action.reads:
            key = rank, value
            if key in self.depth:
                self.waited[rank] = max(self.waited[rank], self.depth[key])
            elif key in self.coming:
                return False
        if action.op is Op.SEND and self.is_sent(action):
            self.depth[action.peer, _present(action.value)] = self.waited[rank] + 1
        elif action.op is Op.COLLECTIVE and self.is_sent(action):
            name = collective_name(_present(action.value))
            self.coming.add((rank, _present(action.value)))
            self.joined[name].append(action)
            if len(self.joined[name]) == self.parts[name]:
                reached = max(self.waited[part.rank] for part in self.joined[name]) + ring_hops(action, self.ranks)
                self.depth |= {(part.rank, _present(part.value)): reached for part in self.joined[name]}
        return True


def _present(value: Value | None) -> Value:
    assert value is not None
    return value
