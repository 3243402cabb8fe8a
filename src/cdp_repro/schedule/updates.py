"""Passes that derive when each holder of a stage updates it, and when a version is freed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
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
            if placement.completes_sum(action) and not placement.is_shared(action.stage):
                assert action.micro_batch is not None
                version = placement.mode.version_made(action.micro_batch)
                actions.append(Action(Op.UPDATE, action.stage, version=version, rank=action.rank))
        yield Slot(slot.number, tuple(actions))


def add_shared_updates(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Update each stage that has several holders, on each just before it reads the new version for the first time.

    So nobody keeps an old version longer than it reads it. The sum of a training step's gradients goes from holder to
    holder in the order in which they need it: from the one that completes it at once, from the others after their
    update. It so has long to travel, but a rank waits for it only when it needs it itself. A rank sends one sum a
    slot, and takes one, unless the next slot needs more; sums that can wait give way. After the last slot the sums
    reach the remaining holders. A sum that an exchange or a collective has brought everywhere goes nowhere.
    """
    relays: _Relays = {}
    number = 0
    for slot, following in with_next(slots):
        number = slot.number
        for action in slot.actions:
            if placement.completes_sum(action) and placement.is_shared(action.stage):
                assert action.micro_batch is not None
                version = placement.mode.version_made(action.micro_batch)
                need = placement.in_order_of_need(action.stage, version)
                everywhere = action.op is Op.COLLECTIVE or placement.is_exchanged(action.micro_batch, action.stage)
                # an exchange completes the same sum twice in a slot, a collective on every rank: the last entry stays
                relays[action.stage, version] = _Relay(action.stage, version, need, action.rank, number, everywhere)
        early, late = _relayed(relays, list(_first_reads(following, placement, relays)), number)
        yield Slot(number, (*early, *slot.actions, *late))
    while relays:
        number += 1
        oldest = dict(sorted(relays, reverse=True))
        reads = [(stage, version, relays[stage, version].next_in_need) for stage, version in sorted(oldest.items())]
        early, late = _relayed(relays, reads, number)
        yield Slot(number, (*early, *late))


def _first_reads(following: Slot | None, placement: Placement, relays: _Relays) -> Iterator[tuple[int, int, int]]:
    """Yield (stage, version, rank) of each update that a forward of the next slot asks for, in order of versions."""
    versions: dict[int, list[int]] = defaultdict(list)
    for stage, version in relays:
        versions[stage].append(version)
    for action in following.actions if following else ():
        if action.op is Op.FORWARD and placement.is_shared(action.stage):
            assert action.version is not None
            for version in sorted(versions.get(action.stage, ())):
                if version <= action.version and action.rank not in relays[action.stage, version].updated:
                    yield action.stage, version, action.rank


def _relayed(relays: _Relays, reads: Iterable[tuple[int, int, int]], slot: int) -> tuple[list[Action], list[Action]]:
    """Return the actions of `slot` before and after its compute, and forget the relays that are done."""
    early: list[Action] = []
    late: list[Action] = []
    for stage, version, rank in reads:
        relay = relays[stage, version]
        while rank not in relay.reached:
            (early if relay.is_ready(before=slot) else late).extend(relay.hand_on())
        late.append(relay.update(rank, slot))
    sends = [action for action in (*early, *late) if action.op is Op.SEND]
    senders, receivers = {action.rank for action in sends}, {action.peer for action in sends}
    for relay in relays.values():
        can_wait = relay.is_ready(before=slot) or relay.has_just_completed(slot)
        if relay.waiting and can_wait and relay.at not in senders and relay.waiting[0] not in receivers:
            senders.add(relay.at)
            receivers.add(relay.waiting[0])
            (early if relay.is_ready(before=slot) else late).extend(relay.hand_on())
    for key in [key for key, relay in relays.items() if relay.is_done]:
        del relays[key]
    return early, late


@dataclass
class _Relay:
    """The way of one complete gradient sum from holder to holder."""

    stage: int
    version: int
    need: Sequence[int]
    """The holders in the order in which they need it."""
    at: int
    """The rank that hands it on next: first the one that completes it."""
    ready: int | None
    """The slot in which that rank completes it, or updates with it; None as long as it does not."""
    everywhere: bool
    """Whether all holders have it from the start, by a collective or an exchange."""
    waiting: deque[int] = field(init=False)
    """The holders that it has not reached, in the order in which it does."""
    reached: set[int] = field(init=False)
    updated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reached = {*self.need} if self.everywhere else {self.at}
        self.waiting = deque(rank for rank in self.need if rank not in self.reached)

    def is_ready(self, before: int) -> bool:
        """Whether it could be handed on before the compute of a slot."""
        return self.ready is not None and self.ready < before

    def has_just_completed(self, slot: int) -> bool:
        """Whether its last gradient was added in this slot."""
        return self.ready == slot and self.at not in self.updated

    @property
    def is_done(self) -> bool:
        return len(self.updated) == len(self.need)

    @property
    def next_in_need(self) -> int:
        """The holder that updates next."""
        return next(rank for rank in self.need if rank not in self.updated)

    def hand_on(self) -> list[Action]:
        """Return what sends it to the next holder; a total that stayed for that is freed."""
        source, self.at, self.ready = self.at, self.waiting.popleft(), None
        self.reached.add(self.at)
        hop = send(Payload.TOTAL, self.stage, source, self.at, version=self.version)
        if source not in self.updated:
            return [*hop]
        return [*hop, Action(Op.FREE, self.stage, version=self.version, payload=Payload.TOTAL, rank=source)]

    def update(self, rank: int, slot: int) -> Action:
        """Return what makes `rank` update in `slot`; the total stays if it is to be handed on."""
        self.updated.add(rank)
        stays = rank == self.at and bool(self.waiting)
        if stays:
            self.ready = slot
        payload = Payload.TOTAL if stays else None
        return Action(Op.UPDATE, self.stage, version=self.version, payload=payload, rank=rank)


_Relays = dict[tuple[int, int], _Relay]
"""By stage and version, in the order in which their sums were completed."""


def add_frees(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Free each version on each rank after the last action that reads it there.

    Those are the update that makes the next version, and the backward of the last micro-batch that the rank reads it
    for (of a stage that is lent: what brings it to that backward). Freeing before an update keeps at
    most max_i d(i, j) + 1 versions (2 for CDP).
    """
    versions = _Versions(placement)
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            actions += versions.freed_after(action)
        yield Slot(slot.number, tuple(actions))


@dataclass(slots=True)
class _Copy:
    """One rank's versions of one stage that are alive, oldest first, and how far their readers have come."""

    alive: list[int]
    next_reader: int
    """The first micro-batch that will still read one of them."""
    done_ahead: set[int] = field(default_factory=set)
    """Micro-batches after it that have read for the last time."""


class _Versions:
    """The versions that are alive on each rank, and how far each rank has come in reading them."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._copies: dict[tuple[int, int], _Copy] = {}
        self._lent_forward: set[tuple[int, int]] = set()
        self._started = False

    def _start(self, step: int) -> None:
        """Start from what a pipeline holds that has drained after `step` training steps."""
        self._started = True
        placement, first = self._placement, step * self._placement.mode.micro_batches
        for stage in range(placement.mode.stages):
            for rank in placement.holders(stage):
                kept = list(placement.versions_kept(rank, stage, step))
                self._copies[rank, stage] = _Copy(kept, placement.next_reader(rank, stage, first))

    def freed_after(self, action: Action) -> Iterator[Action]:
        """Enter what has just run; yield the frees that it allows."""
        if not self._started and action.micro_batch is not None:
            self._start(action.micro_batch // self._placement.mode.micro_batches)
        rank, stage = action.rank, action.stage
        if action.op is Op.UPDATE:
            assert action.version is not None
            copy = self._copies[rank, stage]
            copy.alive.append(action.version)
        elif self._ends_read(action):
            assert action.micro_batch is not None
            copy = self._copies[rank, stage]
            self._advance(copy, rank, stage, action.micro_batch)
        else:
            return
        alive = copy.alive
        if len(alive) == 1:  # the newest stays
            return
        oldest = min(alive[-1], self._placement.oldest_read_after(rank, stage, copy.next_reader - 1))
        while alive[0] < oldest:
            yield Action(Op.FREE, stage, version=alive.pop(0), rank=rank)

    def _advance(self, copy: _Copy, rank: int, stage: int, micro_batch: int) -> None:
        """Enter that a micro-batch has read for the last time; those of one slot may come in any order."""
        copy.done_ahead.add(micro_batch)
        while copy.next_reader in copy.done_ahead:
            copy.done_ahead.remove(copy.next_reader)
            copy.next_reader = self._placement.next_reader(rank, stage, copy.next_reader + 1)

    def _ends_read(self, action: Action) -> bool:
        """Whether a micro-batch has read a version of the stage's holder for the last time."""
        if action.op is Op.BACKWARD:
            return not self._placement.borrows(action.rank, action.stage)
        is_lent = action.op in (Op.SEND, Op.COLLECTIVE)
        if action.payload is not Payload.PARAMETERS or not is_lent or action.micro_batch is None:
            return False
        key = action.micro_batch, action.stage
        if key in self._lent_forward:
            self._lent_forward.remove(key)
            return True
        self._lent_forward.add(key)
        return False
