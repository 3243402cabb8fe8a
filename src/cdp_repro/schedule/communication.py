"""Passes that derive every message between ranks from where compute and state are placed.

In a slot, a rank first sends what has been ready since an earlier slot, which overlaps with its compute, then
computes, then sends what it has just made. A message of slot k is there before slot k+1 needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdp_repro.schedule.actions import Action, Op, Payload, Slot, send
from cdp_repro.schedule.passes import before_use, with_next
from cdp_repro.schedule.placement import Placement


def add_boundary_messages(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Send activations to the rank of the next stage and their gradients back, where it is another rank."""
    last = placement.mode.stages - 1
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            stage, m = action.stage, action.micro_batch
            assert m is not None
            if action.op is Op.FORWARD and stage < last:
                actions += _unless_here(Payload.ACTIVATIONS, action, placement.rank_of(m, stage + 1))
            elif action.op is Op.BACKWARD and stage > 0:
                actions += _unless_here(Payload.INPUT_GRADIENTS, action, placement.rank_of(m, stage - 1))
        yield Slot(slot.number, tuple(actions))


def add_buffer_messages(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Send a worker's buffers after each forward, where another rank computes the stage for it the next time."""
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            if action.op is Op.FORWARD and action.micro_batch is not None:
                next_time = placement.rank_of(action.micro_batch + placement.mode.micro_batches, action.stage)
                actions += _unless_here(Payload.BUFFERS, action, next_time)
        yield Slot(slot.number, tuple(actions))


def _unless_here(payload: Payload, action: Action, destination: int) -> tuple[Action, ...]:
    if destination == action.rank:
        return ()
    return send(payload, action.stage, action.rank, destination, micro_batch=action.micro_batch)


def add_partial_sums(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Sum the gradients of a stage over the micro-batches of a training step, in their order, along their ranks.

    The partial sum goes from the rank of each micro-batch to that of the next, which adds it to its own gradient. Where
    there are two ranks, that of the last micro-batch sends its own gradient back, and both complete the sum: it is the
    same on both, and neither waits for the other's. Where such exchanges are all that is sent, the other rank gets
    ready for that gradient when it sends its own part: a rank may come late to the slot in which the other sends.
    """
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            if action.op is Op.BACKWARD and action.stage not in placement.lent:
                actions += _partial_sum(action, placement)
        yield Slot(slot.number, tuple(actions))


def _partial_sum(backward: Action, placement: Placement) -> Iterator[Action]:
    """Add the sum up to the micro-batch before, if it comes from another rank, and hand on the sum to the next."""
    assert backward.micro_batch is not None
    stage, m, rank = backward.stage, backward.micro_batch, backward.rank
    worker, last = m % placement.mode.micro_batches, placement.mode.micro_batches - 1
    before, after = placement.rank_of(m - 1, stage), placement.rank_of(m + 1, stage)
    is_exchanged = placement.is_exchanged(m, stage)
    if is_exchanged and worker == last:
        hand_back, receive = send(Payload.GRADIENTS, stage, rank, before, micro_batch=m)
        yield hand_back
        if not placement.only_exchanges:
            yield receive
        yield Action(Op.ADD, stage, m, rank=before)
    if worker > 0 and before != rank:
        yield Action(Op.ADD, stage, m - 1, rank=rank)
    if worker < last:
        yield from _unless_here(Payload.GRADIENTS, backward, after)
        if is_exchanged and placement.only_exchanges:
            yield send(Payload.GRADIENTS, stage, after, rank, micro_batch=m + 1)[1]


def add_sums_at_owners(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Send the gradients of each stage that is lent to its owner, which adds them in the order of the micro-batches."""
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            actions.append(action)
            if action.op is Op.BACKWARD and action.stage in placement.lent:
                (owner,) = placement.holders(action.stage)
                actions += _unless_here(Payload.GRADIENTS, action, owner)
                actions.append(Action(Op.ADD, action.stage, action.micro_batch, rank=owner))
        yield Slot(slot.number, tuple(actions))


def put_off_sums_at_owners(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Have the owner of a stage that is lent add gradients a slot later, when they have arrived.

    At once only if the next slot reads the version that is made from the sum.
    """
    waiting: list[Action] = []
    for slot, following in with_next(slots):
        actions: list[Action] = []
        arriving: list[Action] = []
        for action in slot.actions:
            (arriving if action.op is Op.ADD and action.stage in placement.lent else actions).append(action)
        urgent = _read_next(following)
        actions += waiting
        waiting = []
        for add in arriving:
            assert add.micro_batch is not None
            made = add.stage, placement.mode.version_made(add.micro_batch)
            is_urgent = following is None or made in urgent
            (actions if is_urgent else waiting).append(add)
        yield Slot(slot.number, tuple(actions))


def put_off_exchanged_sums(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Have each of two holders add what the other has sent not before it needs the sum, or starts the next.

    So that a slow link is waited for as late as one sum for each stage allows.
    """
    waiting: dict[tuple[int, int], Action] = {}
    for slot in slots:
        actions: list[Action] = []
        for action in slot.actions:
            place, m = (action.rank, action.stage), action.micro_batch
            if action.op is Op.ADD and m is not None and placement.is_exchanged(m, action.stage):
                waiting[place] = action
                continue
            if place in waiting and _needs_sum(action, waiting[place], placement):
                actions.append(waiting.pop(place))
            actions.append(action)
        yield Slot(slot.number, tuple(actions))


def _needs_sum(action: Action, add: Action, placement: Placement) -> bool:
    """Whether `action` updates with the sum that `add` completes, or starts the next one in its place."""
    if action.op is Op.BACKWARD:
        return True
    assert add.micro_batch is not None
    return action.op is Op.UPDATE and action.version == placement.mode.version_made(add.micro_batch)


def _read_next(following: Slot | None) -> set[tuple[int, int | None]]:
    """Return (stage, version) of each read in the slot that follows."""
    return {(action.stage, action.version) for action in following.actions} if following else set()


def add_parameter_messages(slots: Iterable[Slot], placement: Placement) -> Iterator[Slot]:
    """Lend the parameters of a stage, from its owner to the rank that computes with them in the next slot."""
    return before_use(slots, lambda slot: _lending(slot, placement))


def _lending(slot: Slot, placement: Placement) -> Iterator[Action]:
    """Yield both ends of each message with parameters that the compute of `slot` needs."""
    for action in slot.actions:
        if action.op.is_compute and action.stage in placement.lent:
            (owner,) = placement.holders(action.stage)
            if placement.borrows(action.rank, action.stage):
                yield from send(
                    Payload.PARAMETERS, action.stage, owner, action.rank,
                    micro_batch=action.micro_batch, version=action.version,
                )  # fmt: skip
