"""The check of a program: every value is there when it is read, and every action does what its kind requires.

The check follows the values of all ranks through a run, slot by slot. With the rules on what each kind of action reads
and writes, it proves: micro-batches run their stages forward, then backward; versions are those of the rule; sums and
running statistics hold each micro-batch once, in order; each version is made once; messages match at both ends; nothing
waits for a later action; nothing is left over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.grid import text_grid
from cdp_repro.schedule.meaning import fault_of
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.timelines.cyclic import Cyclic
from cdp_repro.schedule.values import LENT, Kind, Value, buffers, collective_name

SHOWN_SLOTS = 128
"""The most slots before a fault that its error shows."""

SHOWN_WIDTH = 240
"""Width, in characters, of the grid that an error shows."""


class ScheduleError(ValueError):
    """A program cannot run, or would compute something other than its rule; the message shows the grid at the fault."""

    piece: tuple[int, str, int] | None = None
    """Where a program file has the fault: the first step of the run, and the kind and number of the piece."""

    def __init__(self, message: str, slot: int | None = None, action: Action | None = None) -> None:
        """`slot` and `action` locate the fault, if it has one location."""
        super().__init__(message)
        self.slot = slot
        self.action = action


State = set[tuple[int, int, Value, int]]
"""Everything that later actions depend on.

(rank, rank, value, 0) for each value on a rank; (rank, peer, value, place) for each end of a message whose other end
has not come. `place` is its position in the queue of its edge: 1, 2, .. for receives and -1, -2, .. for sends.
"""


class _OpenEnd(NamedTuple):
    """One end of a message whose other end has not come."""

    action: Action
    slot: int
    born: int | None
    """For a SEND, the slot in which the value was made."""


class Checker:
    """Follows the values of all ranks through a run, piece by piece; raises at the first fault."""

    def __init__(self, schedule: Schedule, first_step: int, slots: Sequence[Slot]) -> None:
        """The run begins at `first_step`, with the values that ranks hold there; `slots` are all of its slots."""
        self._schedule, self._first_step, self._slots = schedule, first_step, slots
        self._first_micro_batch, self._first_version = schedule.ahead(first_step)
        held = schedule.held_after(first_step)
        self._live: list[dict[Value, int | None]] = [dict.fromkeys(held.get(r, ()), -1) for r in range(schedule.ranks)]
        """By rank: each value on it, and the slot in which it was made, on this rank or on the one that sent it.

        -1: it is there from the start; None: it is still on its way.
        """
        self._edges: dict[tuple[int, int], deque[_OpenEnd]] = defaultdict(deque)
        self._joined: dict[int, Action] = {}
        """By rank: its action in the one collective that has begun."""
        self._busy: dict[tuple[str, int, int], Action] = {}
        self._counted: dict[Value, int] = {}
        """For each set of running statistics, the last micro-batch that a forward has added to it."""
        self._updated: dict[tuple[int, int], int] = {}
        """By rank and stage, the newest version that an update has made."""
        self.pieces: list[list[Slot]] = []
        """The pieces checked so far; each slot has its actions in an order in which one process could run them."""
        self.states = [self._state()]
        """The state at the start, and at the end of each piece."""

    def follow(self, end: int) -> None:
        """Check the next piece: the slots before `end` that no piece has yet."""
        begin = self._done
        self.pieces.append([])
        for slot in self._slots[begin:end]:
            self.pieces[-1].append(self._slot(slot))
        self.states.append(self._state())

    @property
    def _done(self) -> int:
        """Number of slots checked so far."""
        return sum(map(len, self.pieces))

    def _slot(self, slot: Slot) -> Slot:
        """Check a slot; return it with its actions in an order in which one process could run them.

        Slots are not barriers: an action that waits for a message is tried again after other ranks have gone on. If no
        action can run, the ranks wait for each other for ever.
        """
        self._busy.clear()
        waiting, ordered = list(slot.actions), []
        while waiting:
            blocked: list[Action] = []
            blocked_ranks: set[int] = set()
            for action in waiting:
                if action.rank not in blocked_ranks and self._apply(slot.number, action):
                    ordered.append(action)
                else:
                    blocked.append(action)
                    blocked_ranks.add(action.rank)
            if len(blocked) == len(waiting):
                raise self._error(blocked[0], self._why_it_waits(blocked[0]))
            waiting = blocked
        self._end_slot(ordered)
        return Slot(slot.number, tuple(ordered))

    def _state(self) -> State:
        """Return everything that later actions depend on."""
        live = {(rank, rank, value, 0) for rank, values in enumerate(self._live) for value in values}
        return live | {
            (end.action.rank, end.action.peer, end.action.value, place if end.action.op is Op.RECEIVE else -place)
            for ends in self._edges.values()
            for place, end in enumerate(ends, start=1)
            if end.action.value is not None
        }

    def end(self, steps: int) -> None:
        """Check the last piece, and that after `steps` training steps ranks have exactly the values held there."""
        self.follow(len(self._slots))
        held = self._schedule.held_after(self._first_step + steps)
        open_ends = [f"rank {end.action.rank}: {end.action.label}" for ends in self._edges.values() for end in ends]
        if open_ends:
            raise self._error(None, f"the program ends with messages of one end only: {'; '.join(open_ends[:4])}")
        for rank, live in enumerate(self._live):
            expected = set(held.get(rank, ()))
            if live.keys() != expected:
                unused, missing = (
                    sorted(map(str, values)) for values in (live.keys() - expected, expected - live.keys())
                )
                told = [f"with {', '.join(unused[:4])}, which nothing has read for the last time"] if unused else []
                told += [f"without {', '.join(missing[:4])}"] if missing else []
                raise self._error(None, f"the program ends {' and '.join(told)}, on rank {rank}")

    def _apply(self, slot: int, action: Action) -> bool:
        """Apply an action; return False if the action has to wait for another rank."""
        op, rank, ranks = action.op, action.rank, self._schedule.ranks
        if not 0 <= rank < ranks or not -1 <= action.peer < ranks:
            raise self._error(action, f"{self._schedule} has only ranks 0 to {ranks - 1}")
        live, is_compute = self._live[rank], op.is_compute
        fault = fault_of(action, self._schedule)
        if fault:
            raise self._error(action, fault)
        for value in action.reads:
            if (made := live.get(value)) is None:
                if value in live:  # on its way
                    return False
                raise self._too_early(self._why_not_there(value, rank), action, value, slot)
            if is_compute and made >= slot and value.kind in (Kind.PARAMETERS, *LENT):
                why = f"version {action.version} of stage {action.stage} is made only in this same slot"
                raise self._too_early(why, action, value, slot)
        is_collective = op is Op.COLLECTIVE
        if is_collective and not self._can_join(action):
            return False
        if is_compute:
            self._occupy(action)
        if op is Op.FORWARD:
            self._count(action)
        elif op is Op.UPDATE:
            self._make_once(action)
        born = live[action.reads[0]] if op is Op.SEND else slot
        for value in action.frees:
            if live.pop(value, None) is None:
                raise self._error(action, f"it frees {value} twice")
        if op.is_message:
            self._message(slot, action, born)
        elif is_collective:
            self._join(slot, action)
        else:
            for value in action.writes:
                self._write(action, value, slot)
        return True

    def _write(self, action: Action, value: Value, slot: int | None) -> None:
        if value in self._live[action.rank]:
            raise self._error(action, f"{value} is on rank {action.rank} already")
        self._live[action.rank][value] = slot

    def _occupy(self, action: Action) -> None:
        """Enter a compute: a micro-batch's branch, a rank and, unless shared, a stage have at most one per slot."""
        sizes, m = self._schedule.sizes, action.micro_batch
        users = [("micro-batch", m, sizes.branch_of[action.stage])] if action.op.passes_on else []
        if self._schedule.ranks > 1:  # a single device computes for all workers in turn
            users.append(("rank", action.rank, 0))
        if self._schedule.timeline.has_exclusive_stages:
            users.append(("stage", action.stage, m % sizes.replicas))
        for user in users:
            if user in self._busy:
                label = self._busy[user].label
                raise self._error(action, f"{user[0]} {user[1]} would compute two things in one slot: it has {label}")
            self._busy[user] = action

    def _count(self, action: Action) -> None:
        """Add a micro-batch to its running statistics, moving averages that depend on its place in the order."""
        m, added = action.micro_batch, buffers(action.stage, self._schedule.statistics_of(action.micro_batch))
        if (last := self._counted.get(added, self._first_micro_batch - 1)) >= m:
            raise self._error(
                action, f"{added} has micro-batch {last} already: running statistics take micro-batches in their order"
            )
        self._counted[added] = m

    def _make_once(self, action: Action) -> None:
        """Enter an update. A version that is gone could be made again, but the optimizer would make two steps."""
        place = action.rank, action.stage
        if action.version <= self._updated.get(place, self._first_version):
            raise self._error(
                action, "the rank has made this version before: its optimizer would make the same step twice"
            )
        self._updated[place] = action.version

    def _message(self, slot: int, action: Action, born: int | None) -> None:
        """Match an end of a message with its other end, which must be the oldest open end on this edge."""
        value, edge = action.value, action.edge
        assert value is not None and edge is not None
        is_send, (source, destination) = action.op is Op.SEND, edge
        if source == destination:
            raise self._error(action, "a rank sends to itself")
        if not is_send:
            self._write(action, value, None)
        ends = self._edges[edge]
        if not ends or ends[0].action.op is action.op:
            ends.append(_OpenEnd(action, slot, born))
            return
        other = ends[0]
        if other.action.value != value:
            before = other.action
            raise self._error(
                action,
                f"its other end must come after that of {before.label} (rank {before.rank}, slot {other.slot})",
            )
        apart, schedule = slot - other.slot, self._schedule
        if is_send and apart > schedule.slots_per_step:
            raise self._error(
                action,
                f"its receive stands {apart} slots before it, in slot {other.slot}: at most a training step, "
                f"{schedule.slots_per_step} slots, is allowed, since its buffer is held from there on",
            )
        if not is_send and apart > schedule.kept_slots:
            raise self._error(
                action,
                f"its send stands {apart} slots before it, in slot {other.slot}: at most {schedule.kept_slots} slots, "
                "twice the stages, are allowed, since the sender then waits for it",
            )
        ends.popleft()
        self._live[destination][value] = born if is_send else other.born

    def _can_join(self, action: Action) -> bool:
        """Whether the rank can join a collective: no other collective has begun."""
        names = {collective_name(each.value) for each in (*self._joined.values(), action) if each.value}
        return len(names) == 1 and action.rank not in self._joined

    def _join(self, slot: int, action: Action) -> None:
        """Enter a rank's action in a collective; after the last one, all ranks have the result."""
        self._joined[action.rank] = action
        self._write(action, action.writes[0], None)
        if len(self._joined) < self._schedule.ranks:
            return
        parts, self._joined = self._joined, {}
        for rank, part in parts.items():
            self._live[rank][part.writes[0]] = slot - 1  # gathered values were made in an earlier slot

    def _end_slot(self, actions: Iterable[Action]) -> None:
        if self._joined:
            missing = [rank for rank in range(self._schedule.ranks) if rank not in self._joined]
            part = next(iter(self._joined.values()))
            raise self._error(part, f"ranks {missing} do not take part")
        for action in actions:
            if action.op is Op.UPDATE:
                (newest,) = action.writes
                allowed = self._schedule.rule.largest_by_stage[action.stage] + 1
                oldest = newest.shifted(0, -allowed)
                between = (newest.shifted(0, -back) for back in range(allowed))
                live = self._live[action.rank]
                if oldest in live and all(version in live for version in between):
                    raise self._error(action, f"{allowed + 1} versions are kept; the rule needs {allowed}")

    def _why_not_there(self, value: Value, rank: int) -> str:
        alive = sorted(str(v) for v, made in self._live[rank].items() if v[:2] == value[:2] and made is not None)
        return f"{value} is not on rank {rank}" + (f"; there are {', '.join(alive[:6])}" if alive else "")

    def _too_early(self, why: str, action: Action, read: Value, slot: int) -> ScheduleError:
        """Return the fault of a read; if the timeline makes the rule's version later, with when, and what works."""
        lent = action.value if action.op is Op.SEND and action.value and action.value.kind in LENT else None
        m, stage = lent.number if lent else action.micro_batch, action.stage
        schedule, sizes = self._schedule, self._schedule.sizes
        made = self._made(read)
        if read.kind != Kind.PARAMETERS or m < 0 or read.number != schedule.rule.version(m, stage) or made < slot:
            return self._error(action, why)
        i = m % sizes.micro_batches // sizes.replicas
        staleness = schedule.rule.matrix[i][stage]
        works = staleness + next(more for more in count(1) if self._made(read.shifted(0, -more)) < slot)
        smallest = "; mode=cdp_v2 is the smallest staleness everywhere" if isinstance(schedule.timeline, Cyclic) else ""
        return self._error(
            action,
            f"{why}.\nStaleness {staleness} of (micro-batch {i}, stage {stage}) asks for that version in slot {slot}, "
            f"but its last gradient is there only after slot {made}: it exists from slot {made + 1} on. "
            f"Staleness {works} works at this place{smallest}",
            last_slot=made + 1,
        )

    def _made(self, version: Value) -> int:
        """Return the slot with the last gradient of a version of a stage; less than 0 before the run."""
        schedule, sizes = self._schedule, self._schedule.sizes
        step, last = divmod(version.number * sizes.summed - 1, sizes.micro_batches)
        within = schedule.timeline.backward_weights(last // sizes.replicas, version.stage)
        return (step - self._first_step) * schedule.slots_per_step + within

    def _why_it_waits(self, action: Action) -> str:
        missing = [value for value in action.reads if self._live[action.rank].get(value) is None]
        names = ", ".join(map(str, missing)) or "the other ranks"
        for later in self._slots[self._done + 1 :]:
            if any(a.op is Op.SEND and a.value in missing for a in later.actions):
                return f"it waits for {names}, which is sent only in slot {later.number}"
        return f"it waits for {names}, and ranks wait for each other in a cycle, or nothing sends it"

    def _error(self, action: Action | None, fault: str, last_slot: int = -1) -> ScheduleError:
        """Return the error of a fault in the slot under check; `last_slot` is the last that its text speaks of."""
        done = self._done
        slot = self._slots[done].number if done < len(self._slots) else None
        where = "" if slot is None else f"slot {slot}, "
        rank = f"rank {action.rank}, " if action and self._schedule.ranks > 1 else ""
        what = f"{action.label}: " if action else ""
        end = min(len(self._slots), max(done, last_slot) + 1)
        shown = self._slots[max(0, end - min(2 * self._schedule.stages, SHOWN_SLOTS)) : end]
        grid = text_grid(shown, self._schedule.timeline.lanes, SHOWN_WIDTH)
        return ScheduleError(f"{where}{rank}{what}{fault}\n\n{grid}", slot, action)
