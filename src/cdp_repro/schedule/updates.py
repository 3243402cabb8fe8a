"""Passes that derive when each holder of a stage updates it, and when a version is freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cdp_repro.schedule.actions import Action, Op, Payload, Slot, send
from cdp_repro.schedule.passes import with_next
from cdp_repro.schedule.placement import Placement


def add_updates(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Update each stage that has one holder as soon as the sum of a training step's gradients is complete."""
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            if placement.completes_sum(action) and len(placement.holders(action.stage)) == 1:
                version = _made_version(action, placement)
                actions.append(Action(Op.UPDATE, action.stage, version=version, rank=action.rank))
        yield Slot(slot.number, tuple(actions))


def add_shared_updates(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Update each stage that has several holders, on each just before it reads the new version for the first time.

    The sum of a training step's gradients goes from the holder that has it to the one that needs it next, one message
    between two slots, and no holder keeps an old version longer than it reads it. After the last slot the sums reach
    the remaining holders, one message a stage and slot.
    """
    relays: dict[tuple[int, int], _Relay] = {}
    number = 0
    for slot, following in with_next(slots):
        number = slot.number
        for action in slot.actions:
            if placement.completes_sum(action) and len(placement.holders(action.stage)) > 1:
                version = _made_version(action, placement)
                relays[action.stage, version] = _Relay(placement, action.stage, version, action.rank, number)
        early: list[Action] = []
        late: list[Action] = []
        for stage, version, rank in _first_reads(following, placement, relays):
            ready, fresh = relays[stage, version].bring_to(rank, number)
            early += ready
            late += fresh
        yield Slot(number, (*early, *slot.actions, *late))
        relays = {key: relay for key, relay in relays.items() if not relay.is_done}
    yield from _drain(relays, number)


def _made_version(action: Action, placement: Placement) -> int:
    """Return the version that is made from the gradients of this action's training step."""
    assert action.micro_batch is not None
    return action.micro_batch // placement.mode.micro_batches + 1


def _first_reads(
    following: Slot | None, placement: Placement, relays: dict[tuple[int, int], _Relay]
) -> Iterator[tuple[int, int, int]]:
    """Yield (stage, version, rank) of each update that a forward of the next slot asks for, in order of versions."""
    for action in following.actions if following else ():
        if action.op is Op.FORWARD and len(placement.holders(action.stage)) > 1:
            assert action.version is not None
            waiting = [version for stage, version in relays if stage == action.stage and version <= action.version]
            for version in sorted(waiting):
                if action.rank not in relays[action.stage, version].updated:
                    yield action.stage, version, action.rank


@dataclass
class _Relay:
    """The way of one complete gradient sum from holder to holder."""

    placement: Placement
    stage: int
    version: int
    at: int
    """The rank that received it last, and hands it on."""
    since: int
    """The slot in which it arrived there."""
    reached: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reached.add(self.at)

    @property
    def is_done(self) -> bool:
        return len(self.updated) == len(self.placement.holders(self.stage))

    def bring_to(self, rank: int, slot: int) -> tuple[list[Action], list[Action]]:
        """Return what makes `rank` update in `slot`: what can be sent before the slot's compute, and the rest."""
        early: list[Action] = []
        late: list[Action] = []
        if rank not in self.reached:
            hop = send(Payload.TOTAL, self.stage, self.at, rank, version=self.version)
            (early if self.since < slot else late).extend(hop)
            if self.at in self.updated:
                late.append(self._free(self.at))
            self.at, self.since = rank, slot
            self.reached.add(rank)
        is_asked_for = rank == self.at and len(self.reached) < len(self.placement.holders(self.stage))
        keeps = Payload.TOTAL if is_asked_for else None
        late.append(Action(Op.UPDATE, self.stage, version=self.version, payload=keeps, rank=rank))
        self.updated.add(rank)
        return early, late

    def _free(self, rank: int) -> Action:
        return Action(Op.FREE, self.stage, version=self.version, payload=Payload.TOTAL, rank=rank)

    def next_holder(self) -> int:
        """Return a holder that is still to update: one that has the sum, else the next one after where it is."""
        holders = self.placement.holders(self.stage)
        for rank in self.reached - self.updated:
            return rank
        later = (holders[(self.at - holders.start + hop) % len(holders)] for hop in range(1, len(holders)))
        return next(rank for rank in later if rank not in self.reached)


def _drain(relays: dict[tuple[int, int], _Relay], number: int) -> Iterator[Slot]:
    """Bring each sum to the holders that no forward has asked it for."""
    while relays:
        number += 1
        sent: list[Action] = []
        updates: list[Action] = []
        for stage in sorted({stage for stage, _ in relays}):
            relay = relays[min(key for key in relays if key[0] == stage)]
            early, late = relay.bring_to(relay.next_holder(), number)
            sent += early
            updates += late
        yield Slot(number, (*sent, *updates))
        relays = {key: relay for key, relay in relays.items() if not relay.is_done}


def add_frees(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Free each version on each rank after the last action that reads it there.

    Those are the update that makes the next version, and the backward of the last micro-batch that the rank reads it
    for (of a stage that is lent: the message that carries it to that backward). Freeing before an update keeps at
    most max_i d(i, j) + 1 versions (2 for CDP).
    """
    versions = _Versions(placement)
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            actions += versions.freed_after(action)
        yield Slot(slot.number, tuple(actions))


class _Versions:
    """The versions that are alive on each rank, and how far each rank has come in reading them."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._alive: dict[tuple[int, int], list[int]] = {}
        self._read_up_to: dict[tuple[int, int], int] = {}
        self._read_beyond: dict[tuple[int, int], set[int]] = {}
        self._lent_forward: set[tuple[int, int]] = set()
        self._started = False

    def _start(self, step: int) -> None:
        """Start from what a pipeline holds that has drained after `step` training steps."""
        self._started = True
        for stage in range(self._placement.mode.stages):
            for rank in self._placement.holders(stage):
                self._alive[rank, stage] = list(self._placement.versions_kept(rank, stage, step))
                self._read_up_to[rank, stage] = step * self._placement.mode.micro_batches - 1
                self._read_beyond[rank, stage] = set()

    def freed_after(self, action: Action) -> Iterator[Action]:
        """Enter what has just run; yield the frees that it allows."""
        if not self._started and action.micro_batch is not None:
            self._start(action.micro_batch // self._placement.mode.micro_batches)
        place = action.rank, action.stage
        if action.op is Op.UPDATE:
            assert action.version is not None
            self._alive[place].append(action.version)
        elif self._ends_read(action):
            assert action.micro_batch is not None
            self._advance(place, action.micro_batch)
        else:
            return
        alive = self._alive[place]
        oldest = min(alive[-1], self._placement.oldest_read_after(*place, self._read_up_to[place]))
        while alive[0] < oldest:
            yield Action(Op.FREE, action.stage, version=alive.pop(0), rank=action.rank)

    def _advance(self, place: tuple[int, int], micro_batch: int) -> None:
        """Enter that a micro-batch has read for the last time; those of one slot may come in any order."""
        rank, stage = place
        done = self._read_beyond[place]
        done.add(micro_batch)
        following = self._read_up_to[place] + 1
        while following in done or (done and self._placement.reads_from(following, stage) != rank):
            done.discard(following)
            self._read_up_to[place] = following
            following += 1

    def _ends_read(self, action: Action) -> bool:
        """Whether a micro-batch has read a version of this rank for the last time."""
        if action.op is Op.BACKWARD:
            return (action.rank, action.stage) in self._alive
        if action.op is not Op.SEND or action.payload is not Payload.PARAMETERS or action.micro_batch is None:
            return False
        key = action.micro_batch, action.stage
        if key in self._lent_forward:
            self._lent_forward.remove(key)
            return True
        self._lent_forward.add(key)
        return False
