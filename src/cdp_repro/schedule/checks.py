"""The parts of validation that concern many ranks: messages, collectives, and the sums of gradients."""

from __future__ import annotations

from collections import defaultdict, deque

from cdp_repro.schedule.actions import Action, MessageKey, Op, Payload, result_of
from cdp_repro.schedule.placement import Placement

_NONE = range(0)


def _only(micro_batch: int) -> range:
    return range(micro_batch, micro_batch + 1)


class MessageCheck:
    """Every message is sent and received once, in the same order at both ends, before it is waited for."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], deque[Action]] = {}
        """By source and destination: the ends, all of one kind, whose other ends have not come, oldest first."""
        self._received: dict[tuple[int, MessageKey], int] = defaultdict(int)

    def send(self, action: Action) -> str | None:
        """Enter a SEND."""
        assert action.peer is not None
        if action.peer == action.rank:
            return "a rank sends to itself"
        return self._join(action, action.rank, action.peer)

    def receive(self, action: Action) -> str | None:
        """Enter a RECEIVE, of what has been sent or will be."""
        assert action.peer is not None
        return self._join(action, action.peer, action.rank)

    def _join(self, action: Action, source: int, destination: int) -> str | None:
        """Put one end of a message to its other end, which must be the oldest that is open, or wait for that."""
        ends = self._open.setdefault((source, destination), deque())
        if not ends or ends[0].op is action.op:
            ends.append(action)
            return None
        if ends[0].message != action.message:
            return f"its other end must come after those of {[*map(str, ends)]}"
        ends.popleft()
        if not ends:
            del self._open[source, destination]
        self._received[destination, action.message] += 1
        return None

    def arrive(self, rank: int, key: MessageKey) -> None:
        """Enter what a collective brings to a rank."""
        self._received[rank, key] += 1

    def has(self, rank: int, key: MessageKey) -> bool:
        """Whether a message was received and not used yet."""
        return bool(self._received.get((rank, key)))

    def take(self, rank: int, key: MessageKey) -> bool:
        """Use a message; return whether it was received."""
        if not self.has(rank, key):
            return False
        self._received[rank, key] -= 1
        if not self._received[rank, key]:
            del self._received[rank, key]
        return True

    def leftovers(self) -> str | None:
        """Return what has only one end, or was received and not used; buffers may wait for the next run."""
        single = [f"rank {end.rank}: {end}" for ends in self._open.values() for end in ends]
        unused = [place for place in self._received if place[1][0] is not Payload.BUFFERS]
        return f"the program ends with single ends {single} and unused {unused}" if single or unused else None


class CollectiveCheck:
    """All ranks take part in one collective before any takes part in the next: else they could wait for each other."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: dict[int, Action] = {}

    def join(self, action: Action) -> str | None:
        """Enter a COLLECTIVE."""
        first = next(iter(self._parts.values()), action)
        if (action.payload, action.stage, action.version) != (first.payload, first.stage, first.version):
            return f"it begins before ranks {self._missing} take part in {first}"
        if action.rank in self._parts:
            return "its rank takes part already"
        self._parts[action.rank] = action
        return None

    def completed(self) -> list[Action]:
        """Return the parts of the collective in which the last rank has just taken part; none if ranks are missing."""
        if len(self._parts) < self._ranks:
            return []
        parts = [*self._parts.values()]
        self._parts.clear()
        return parts

    def end_slot(self) -> str | None:
        """Close a slot; return what is wrong with its collectives, or None."""
        if not self._parts:
            return None
        return f"ranks {self._missing} do not take part in {next(iter(self._parts.values()))}"

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self._parts]


class SumCheck:
    """The gradients of a stage are added in the order of the micro-batches, and all of them."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._micro_batches = placement.mode.micro_batches
        self._sums: dict[tuple[int, int], range] = {}
        self._own: set[tuple[int, int, int]] = set()
        """(rank, micro-batch, stage) of gradients of stages that are lent, before they go to the owner."""
        self._last: dict[int, int] = {}
        self._collected: dict[int, int] = {}
        """By stage: the next micro-batch whose gradients a collective that has begun waits for."""
        self.in_transit: dict[tuple[object, ...], range] = {}
        """By receiving rank and message: the micro-batches in a sum."""
        self.totals: set[tuple[int, int, int]] = set()
        """(rank, stage, version) of each complete sum."""

    def steps_done(self, stage: int) -> int:
        """Return after how many training steps the newest complete sum was made."""
        return self._last.get(stage, 0)

    def backward(self, action: Action) -> str | None:
        """Enter the gradients that a backward has made."""
        assert action.micro_batch is not None
        if action.stage in self._placement.lent:
            self._own.add((action.rank, action.micro_batch, action.stage))
            return None
        present = self._sums.get((action.rank, action.stage), _NONE)
        return self._join(action, present, _only(action.micro_batch))

    def add(self, action: Action, arrived: range | None) -> str | None:
        """Enter what an ADD adds: what has arrived, or the rank's own gradients."""
        assert action.micro_batch is not None
        own = (action.rank, action.micro_batch, action.stage)
        if arrived is None:
            if own not in self._own:
                return "the gradients that it adds are not there"
            self._own.remove(own)
            arrived = _only(action.micro_batch)
        present = self._sums.get((action.rank, action.stage), _NONE)
        follows = action.stage in self._placement.lent or (action.micro_batch + 1) % self._micro_batches == 0
        in_order = (present, arrived) if follows else (arrived, present)
        return self._join(action, *in_order)

    def _join(self, action: Action, earlier: range, later: range) -> str | None:
        """Set the sum on the action's rank; one that follows a sum elsewhere may begin in the middle of a step."""
        if earlier and later and earlier.stop != later.start:
            return f"its sum would be of the micro-batches {[*earlier, *later]}, which is not their order"
        members = range((earlier or later).start, (later or earlier).stop)
        step = members[0] // self._micro_batches
        if members[-1] // self._micro_batches != step:
            return f"its sum would mix training steps: micro-batches {[*members]}"
        place = action.rank, action.stage
        self._sums[place] = members
        if len(members) == self._micro_batches:
            if not self._placement.completes_sum(action):
                return "it completes a sum, but the placement does not say so"
            del self._sums[place]
            self._last[action.stage] = step + 1
            self.totals.add((*place, step + 1))
        return None

    def collect(self, action: Action) -> str | None:
        """Enter what a rank brings to a collective of gradients; with the last of them, that the sum is complete."""
        m, stage = action.micro_batch, action.stage
        assert m is not None
        if stage in self._placement.lent:
            is_there = (action.rank, m, stage) in self._own
            self._own.discard((action.rank, m, stage))
        else:
            is_there = self._sums.pop((action.rank, stage), _NONE) == _only(m)
        if not is_there or self._collected.setdefault(stage, m - m % self._micro_batches) != m:
            return "the gradients that it brings are not there, or not the next"
        self._collected[stage] += 1
        if (m + 1) % self._micro_batches == 0:
            del self._collected[stage]
            result, members = result_of(action, self._micro_batches), range(m + 1 - self._micro_batches, m + 1)
            if action.payload is Payload.GRADIENTS:
                self.in_transit |= {(rank, *result): members for rank in self._placement.holders(stage)}
            else:
                self._last[stage] = self._placement.mode.version_made(m)
        return None

    def send(self, action: Action) -> str | None:
        """Enter that a sum leaves its rank."""
        if action.payload is Payload.TOTAL:
            place = action.rank, action.stage, action.version
            return None if place in self.totals else "the total is not on its rank"
        if action.payload is not Payload.GRADIENTS:
            return None
        assert action.micro_batch is not None
        own = (action.rank, action.micro_batch, action.stage)
        if action.stage in self._placement.lent:
            members = _only(action.micro_batch) if own in self._own else _NONE
            self._own.discard(own)
        else:
            members = self._sums.get((action.rank, action.stage), _NONE)
            if members and not self._placement.is_exchanged(action.micro_batch, action.stage):
                del self._sums[action.rank, action.stage]
        if not members or members[-1] != action.micro_batch:
            return f"the sum on its rank is of the micro-batches {[*members]}"
        self.in_transit[action.peer, *action.message] = members
        return None

    def missing(self, rank: int, stage: int, version: int) -> str:
        """Say what the total of a version lacks on a rank."""
        present = self._sums.get((rank, stage), _NONE)
        done = len([m for m in present if m // self._micro_batches == version - 1])
        return f"only {done} of {self._micro_batches} workers have completed their backward (on rank {rank})"

    def leftovers(self) -> str | None:
        """Return which gradients have not made a version, or None."""
        made = self._placement.mode.version_made
        unused = {stage: made(members[0]) for (_, stage), members in self._sums.items()}
        unused |= {stage: version for _, stage, version in self.totals}
        unused |= {stage: made(micro_batch) for _, micro_batch, stage in self._own}
        unused |= {stage: made(micro_batch) for stage, micro_batch in self._collected.items()}
        if unused:
            missing = ", ".join(str(Action(Op.UPDATE, stage, version=v)) for stage, v in sorted(unused.items()))
            return f"the program ends without the updates {missing}"
        return None
