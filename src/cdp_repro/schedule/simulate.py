"""The first interpreter: runs a schedule on costs instead of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cdp_repro.schedule.actions import Action, Op, Payload, Slot
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.trace import Trace, TraceRecorder

Span = tuple[float, float]
"""Start and end of an action, in seconds."""


class _Device:
    """The state of one simulated rank: live activation bytes and live parameter versions."""

    def __init__(self, rank: int, schedule: Schedule, costs: StageCosts) -> None:
        self.recorder = TraceRecorder(rank, costs.stages)
        self._schedule = schedule
        self._costs = costs
        self._live = 0
        self._versions = [int(rank in schedule.placement.holders(stage)) for stage in range(costs.stages)]

    def run(self, slot: int, action: Action, span: Span) -> None:
        stage = action.stage
        if action.op is Op.FORWARD:
            self._live += self._costs.forward_bytes[stage] + self._received(action)[0]
        elif action.op is Op.BACKWARD:
            self._live -= self._costs.backward_bytes[stage] + self._received(action)[1]
        elif action.op is Op.SEND and action.payload is Payload.ACTIVATIONS:
            self._live -= self._costs.left_bytes(stage)
        elif action.op is Op.UPDATE:
            self._versions[stage] += 1
        elif action.op is Op.FREE and action.payload is None:
            self._versions[stage] -= 1
        self.recorder.record(slot, action, self._live, self._versions, span)
        if action.op is Op.SEND and (size := self._costs.sent_bytes(action.payload or Payload.TOTAL, stage)):
            self.recorder.sent(slot, action, size)

    def _received(self, action: Action) -> tuple[int, int]:
        """Return what an input from another rank adds to the bytes that forward and backward take and release."""
        assert action.micro_batch is not None
        if action.stage == 0 or self._schedule.placement.rank_of(action.micro_batch, action.stage - 1) == action.rank:
            return 0, 0
        return self._costs.received_bytes(action.stage)


def slot_clock(slot: int, action: Action) -> Span:  # noqa: ARG001 - the same for all actions of a slot
    """Return the slot itself as the time of its actions: one second each."""
    return float(slot), slot + 1.0


def simulate(schedule: Schedule, costs: StageCosts, steps: int) -> Trace:
    """Run `steps` training steps of the schedule, from the initial parameters, and return the trace of all ranks.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    return simulate_slots(schedule, costs, schedule.slots(range(steps)))


def simulate_slots(
    schedule: Schedule, costs: StageCosts, slots: Iterable[Slot], clock: Callable[[int, Action], Span] = slot_clock
) -> Trace:
    """Run the first slots of the schedule and return the trace of all ranks.

    `clock` is told each action of all ranks, with its slot, in an order in which nothing waits for what comes later,
    and says when it runs; by default a slot is a second.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"the schedule has {schedule.stages} stages but the costs are of {costs.stages}")
    devices = [_Device(rank, schedule, costs) for rank in range(schedule.ranks)]
    for slot in slots:
        for action in sorted(slot.actions, key=lambda action: action.op is not Op.RECEIVE):  # as in a rank's program
            devices[action.rank].run(slot.number, action, clock(slot.number, action))
    return Trace.merged(schedule.micro_batches, schedule.stages, [device.recorder.finish() for device in devices])
