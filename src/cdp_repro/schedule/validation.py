"""Validation: a pass that lets a stream of slots through unchanged as long as every rule holds.

It runs when a schedule is made (over a window that shows the fill, the steady state and the drain) and again as
the program is executed. It holds the micro-batches in flight and the versions alive, nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from cdp_repro.schedule.actions import Action, Op, Payload, Slot, consumed, result_of
from cdp_repro.schedule.checks import CollectiveCheck, MessageCheck, SumCheck
from cdp_repro.schedule.placement import Placement
from cdp_repro.schedule.render import text_grid

SHOWN_SLOTS = 128
"""Slots before a fault that its error shows at most: who keeps those of a training step of 1024 workers holds
millions of actions."""


class ScheduleError(ValueError):
    """A schedule that cannot run, or would compute something other than its rule; shows the grid at the fault."""


class _Progress:
    """How far one micro-batch has come."""

    def __init__(self) -> None:
        self.forwards = 0
        self.backwards = 0
        self.slot = -1


class _State:
    """What has happened so far, as far as later actions depend on it."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.mode = placement.mode
        self.micro_batches = self.mode.micro_batches
        self.stages = self.mode.stages
        self.messages = MessageCheck()
        self.collectives = CollectiveCheck(placement.ranks)
        self.sums = SumCheck(placement)
        self._started = False
        self._first = 0
        self._in_flight: dict[int, _Progress] = {}
        self._made_in_slot: dict[tuple[int, int], dict[int, int]] = {}
        self._busy: dict[tuple[str, int, int], int] = {}
        self._updated: list[tuple[int, int]] = []
        self._checks = {
            Op.FORWARD: self._compute,
            Op.BACKWARD: self._compute,
            Op.UPDATE: self._update,
            Op.FREE: self._free,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.ADD: self._add,
            Op.COLLECTIVE: self._collective,
        }

    def _start(self, step: int) -> None:
        """Start from the versions that a pipeline holds which has drained after `step` training steps."""
        self._started = True
        self._first = step * self.micro_batches
        for stage in range(self.stages):
            for rank in self.placement.holders(stage):
                kept = self.placement.versions_kept(rank, stage, step)
                self._made_in_slot[rank, stage] = dict.fromkeys(kept, -1)

    def check(self, slot: int, action: Action) -> str | None:
        """Apply `action`; return what is wrong with it, or None."""
        if action.stage >= self.stages:
            return f"there are only {self.stages} stages"
        if action.op.is_compute and action.version is None:
            return "no version is assigned"
        if not self._started and action.micro_batch is not None:
            self._start(action.micro_batch // self.micro_batches)
        return self._checks[action.op](slot, action)

    def end_slot(self) -> str | None:
        """Close a slot; return what is wrong with what it leaves behind, or None."""
        self._busy.clear()
        for rank, stage in self._updated:
            alive = self._made_in_slot[rank, stage]
            if len(alive) > self.mode.oldest(stage) + 1:
                return (
                    f"rank {rank} keeps versions {sorted(alive)} of stage {stage}; "
                    f"its rule needs {self.mode.oldest(stage) + 1}"
                )
        self._updated.clear()
        return self.collectives.end_slot()

    def _compute(self, slot: int, action: Action) -> str | None:
        m, stage = action.micro_batch, action.stage
        assert m is not None
        expected = self.placement.rank_of(m, stage)
        if action.rank != expected:
            return f"it is on rank {action.rank}; the placement puts it on rank {expected}"
        return (
            self._version(slot, action)
            or self._exclusive(action, m)
            or self._advance(slot, action, m)
            or self._messages_there(action, m)
            or (self.sums.backward(action) if action.op is Op.BACKWARD else None)
        )

    def _exclusive(self, action: Action, micro_batch: int) -> str | None:
        """A worker computes one thing a slot; but for data parallelism, a stage has one user a slot and replica."""
        worker, replica = micro_batch % self.micro_batches, micro_batch % self.mode.replicas
        user = self._busy.setdefault(("worker", worker, 0), micro_batch)
        if user != micro_batch:
            return f"micro-batches {user} and {micro_batch} use worker {worker} in the same slot"
        if self.mode.timeline == "simultaneous":
            return None
        user = self._busy.setdefault(("stage", action.stage, replica), micro_batch)
        if user != micro_batch:
            place = f"stage {action.stage} of replica {replica}"
            return f"micro-batches {user} and {micro_batch} use {place} in the same slot"
        return None

    def _version(self, slot: int, action: Action) -> str | None:
        expected = self.expected_version(action)
        if action.version != expected:
            return f"its rule asks for version {expected}"
        assert action.micro_batch is not None
        lent = (Payload.PARAMETERS, action.stage, action.micro_batch, action.version, None)
        if self.messages.has(action.rank, lent):
            return None  # it was alive when it was sent
        return self._alive(slot, self.placement.reads_from(action.micro_batch, action.stage), action)

    def _alive(self, slot: int, rank: int, action: Action) -> str | None:
        alive = self._made_in_slot.get((rank, action.stage), {})
        if action.version not in alive:
            return (
                f"version {action.version} of stage {action.stage} is not alive; alive are {sorted(alive)} "
                f"on rank {rank}"
            )
        if action.op.is_compute and alive[action.version] >= slot:
            return f"version {action.version} of stage {action.stage} is made only in this same slot"
        return None

    def expected_version(self, action: Action) -> int:
        """Return the version that the rule asks for in a forward or backward."""
        assert action.micro_batch is not None
        return self.mode.version_read(action.micro_batch, action.stage)

    def _advance(self, slot: int, action: Action, micro_batch: int) -> str | None:
        progress = self._in_flight.setdefault(micro_batch, _Progress())
        expected = (
            (Op.FORWARD, progress.forwards)
            if progress.forwards < self.stages
            else (Op.BACKWARD, self.stages - 1 - progress.backwards)
        )
        if (action.op, action.stage) != expected:
            return f"micro-batch {micro_batch} is due for {Action(*expected, micro_batch)}"
        if slot <= progress.slot:
            return f"micro-batch {micro_batch} already computes in slot {progress.slot}"
        progress.slot = slot
        if action.op is Op.FORWARD:
            progress.forwards += 1
            return None
        progress.backwards += 1
        if progress.backwards == self.stages:
            del self._in_flight[micro_batch]
        return None

    def _messages_there(self, action: Action, micro_batch: int) -> str | None:
        """What compute needs from another rank must have been sent to its own."""
        stage, rank, placement = action.stage, action.rank, self.placement
        sources: dict[Payload, int] = {}
        if action.op is Op.FORWARD and stage > 0:
            sources[Payload.ACTIVATIONS] = placement.rank_of(micro_batch, stage - 1)
        if action.op is Op.BACKWARD and stage < self.stages - 1:
            sources[Payload.INPUT_GRADIENTS] = placement.rank_of(micro_batch, stage + 1)
        if action.op is Op.FORWARD and micro_batch - self.micro_batches >= self._first:
            sources[Payload.BUFFERS] = placement.rank_of(micro_batch - self.micro_batches, stage)
        needed = {payload: [source] for payload, source in sources.items() if source != rank}
        if placement.borrows(rank, stage):
            needed[Payload.PARAMETERS] = [*placement.holders(stage)]
        for key in consumed(action, self.micro_batches):
            if key[0] in needed and not self.messages.take(rank, key):
                ranks = ", ".join(map(str, needed[key[0]]))
                return f"the {key[0]} that it needs from rank {ranks} were not sent to rank {rank}"
        return None

    def _receive(self, _: int, action: Action) -> str | None:
        return self.messages.receive(action)

    def _add(self, _: int, action: Action) -> str | None:
        return self.sums.add(action, self._arrived(action))

    def _collective(self, slot: int, action: Action) -> str | None:
        fault = self.collectives.join(action) or (
            self._alive(slot, action.rank, action)
            if action.payload is Payload.PARAMETERS
            else self.sums.collect(action)
        )
        for part in self.collectives.completed() if fault is None else ():
            self.messages.arrive(part.rank, result_of(part, self.micro_batches))
        return fault

    def _arrived(self, action: Action) -> range | None:
        """Return the micro-batches whose gradients an ADD has received; None if it has received none."""
        keys = consumed(action, self.micro_batches)
        if not all(self.messages.take(action.rank, key) for key in keys):
            return None
        first, *others = [self.sums.in_transit.pop((action.rank, *key), None) for key in keys]
        return first if all(each == first for each in others) else None

    def _send(self, slot: int, action: Action) -> str | None:
        if action.payload is Payload.PARAMETERS and (fault := self._alive(slot, action.rank, action)):
            return fault
        if action.payload in (Payload.ACTIVATIONS, Payload.BUFFERS, Payload.INPUT_GRADIENTS):
            assert action.micro_batch is not None
            progress = self._in_flight.get(action.micro_batch)
            is_made = progress is None or (
                progress.backwards >= self.stages - action.stage
                if action.payload is Payload.INPUT_GRADIENTS
                else progress.forwards > action.stage
            )
            if not is_made or action.rank != self.placement.rank_of(action.micro_batch, action.stage):
                return "what it sends is not there"
        if action.payload is Payload.TOTAL:
            self._take_total(action)
        return self.sums.send(action) or self.messages.send(action)

    def _take_total(self, action: Action) -> None:
        """A total that has arrived stays on its rank until it is freed."""
        assert action.version is not None
        for key in consumed(action, self.micro_batches):
            if self.messages.take(action.rank, key):
                self.sums.totals.add((action.rank, action.stage, action.version))

    def _update(self, slot: int, action: Action) -> str | None:
        stage, version, rank = action.stage, action.version, action.rank
        assert version is not None
        if rank not in self.placement.holders(stage):
            return f"rank {rank} does not hold stage {stage}"
        self._take_total(action)
        if (rank, stage, version) not in self.sums.totals:
            return self.sums.missing(rank, stage, version)
        alive = self._made_in_slot[rank, stage]
        if version - 1 not in alive or version in alive:
            return f"needs version {version - 1} alive and makes {version}; alive are {sorted(alive)}"
        alive[version] = slot
        self._updated.append((rank, stage))
        if action.payload is None:
            self.sums.totals.remove((rank, stage, version))
        return None

    def _free(self, _: int, action: Action) -> str | None:
        stage, version, rank = action.stage, action.version, action.rank
        assert version is not None
        alive = self._made_in_slot.get((rank, stage), {})
        if action.payload is Payload.TOTAL:
            if (rank, stage, version) not in self.sums.totals or version > max(alive):
                return "the total is not there, or not used yet"
            self.sums.totals.remove((rank, stage, version))
            return None
        if version not in alive or len(alive) == 1:
            return f"cannot free version {version}; alive are {sorted(alive)}"
        del alive[version]
        return None

    def leftovers(self) -> str | None:
        """Return what is unfinished or wrong after a drain, or None."""
        if self._in_flight:
            return f"the program ends with micro-batches {sorted(self._in_flight)} unfinished"
        for (rank, stage), alive in self._made_in_slot.items():
            needed = list(self.placement.versions_kept(rank, stage, self.sums.steps_done(stage)))
            if sorted(alive) != needed:
                return (
                    f"the program ends with versions {sorted(alive)} of stage {stage} on rank {rank}; "
                    f"its rule needs {needed}"
                )
        return self.sums.leftovers() or self.messages.leftovers()


def validated(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Yield `slots` unchanged; raise ScheduleError at the first that breaks a rule.

    Checked: each micro-batch runs its stages forward, then backward, one a slot, on the rank of its placement; a
    worker computes one thing a slot, and but for data parallelism a stage has one user a slot; a forward and its
    backward read the version that the mode asks for, made in an earlier slot and not freed; what comes from another
    rank was sent before it is waited for, and received in the order in which it was sent, and all ranks take part in a
    collective before its result is waited for or the next begins (so nothing can deadlock: the slots are an order in
    which one process could run all ranks); gradients are summed in the order of the micro-batches, but for those of
    collectives, and a stage is updated once a step from the whole sum; no more versions are kept than the rule needs;
    at the end nothing is left over.
    """
    state = _State(placement)
    recent: deque[Slot] = deque(maxlen=min(2 * state.stages, SHOWN_SLOTS))
    upcoming = iter(slots)
    for slot in upcoming:
        recent.append(slot)
        for action in slot.actions:
            fault = state.check(slot.number, action)
            if fault is not None:
                hint = _when_it_exists(action, state, slot, upcoming)
                place = f"slot {slot.number}, {_where(action, state)}{action}"
                raise ScheduleError(_message(f"{place}: {fault}{hint}", recent, state.micro_batches))
        fault = state.end_slot()
        if fault is not None:
            raise ScheduleError(_message(f"slot {slot.number}: {fault}", recent, state.micro_batches))
        yield slot
    fault = state.leftovers()
    if fault is not None:
        raise ScheduleError(_message(fault, recent, state.micro_batches))


def _when_it_exists(action: Action, state: _State, slot: Slot, upcoming: Iterator[Slot]) -> str:
    """If `action` reads the version of its rule too early, say from which slot on it exists, and what would work.

    Looks no further ahead than the two training steps in which that must happen.
    """
    if not action.op.is_compute or action.micro_batch is None or action.version is None:
        return ""
    if action.stage >= state.stages or action.version != state.expected_version(action):
        return ""
    soon = chain([slot], islice(upcoming, 4 * state.stages))
    made = next((later.number for later in soon if _makes(later, action.stage, action.version)), None)
    if made is None:
        return ""
    worker = action.micro_batch % state.micro_batches
    delay = state.mode.staleness[worker][action.stage]
    return (
        f".\nStaleness {delay} of (worker {worker}, stage {action.stage}) asks for that version in slot {slot.number}, "
        f"but its last gradient is there only after slot {made}: it exists from slot {made + 1} on. "
        f"Staleness {delay + 1} works at this place; mode=cdp_v2 is the smallest staleness everywhere"
    )


def _makes(slot: Slot, stage: int, version: int) -> bool:
    return any((a.op, a.stage, a.version) == (Op.UPDATE, stage, version) for a in slot.actions)


def _where(action: Action, state: _State) -> str:
    return f"rank {action.rank}, " if state.placement.ranks > 1 else ""


def _message(fault: str, recent: Iterable[Slot], workers: int) -> str:
    return f"{fault}\n\n{text_grid(recent, workers)}"
