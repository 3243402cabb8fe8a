"""The first interpreter: runs a schedule on costs instead of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from cdp_repro.schedule.actions import Action, Op, Payload, Slot
from cdp_repro.schedule.collectives import ring_bytes
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.trace import Trace, TraceRecorder


class Effects:
    """What an action changes on its rank, and what it sends."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        """Raise ValueError if `costs` has another number of stages than the schedule."""
        if costs.stages != schedule.stages:
            raise ValueError(f"the schedule has {schedule.stages} stages but the costs are of {costs.stages}")
        self._schedule = schedule
        self._costs = costs

    def activation_bytes(self, action: Action) -> int:
        """Return by how much the action changes the live activation bytes of its rank."""
        op = action.op
        if op is Op.FORWARD:
            return self._costs.forward_bytes[action.stage] + self._received(action)[0]
        if op is Op.BACKWARD:
            return -self._costs.backward_bytes[action.stage] - self._received(action)[1]
        if op is Op.SEND and action.payload is Payload.ACTIVATIONS:
            return -self._costs.left_bytes(action.stage)
        return 0

    def versions(self, action: Action) -> int:
        """Return by how much the action changes the live parameter versions of its stage on its rank."""
        if action.op is Op.UPDATE:
            return 1
        return -1 if action.op is Op.FREE and action.payload is None else 0

    def bytes_sent(self, action: Action) -> int:
        """Return the bytes that the action sends, by a message or by its part in a collective: 0 if it sends none."""
        size = self.payload_bytes(action)
        return ring_bytes(action, size, self._schedule.ranks) if action.op is Op.COLLECTIVE else size

    def payload_bytes(self, action: Action) -> int:
        """Return the bytes of what the action sends, or of a collective that it is a part in: 0 if there is none."""
        if action.payload is None or action.op not in (Op.SEND, Op.COLLECTIVE):
            return 0
        return self._costs.sent_bytes(action.payload, action.stage, action.part, action.parts)

    def _received(self, action: Action) -> tuple[int, int]:
        """Return what an input from another rank adds to the bytes that forward and backward take and release."""
        assert action.micro_batch is not None
        if action.stage == 0 or self._schedule.placement.rank_of(action.micro_batch, action.stage - 1) == action.rank:
            return 0, 0
        return self._costs.received_bytes(action.stage)


class _Device:
    """The state of one simulated rank: live activation bytes and live parameter versions."""

    def __init__(self, rank: int, schedule: Schedule, effects: Effects) -> None:
        self.recorder = TraceRecorder(rank, schedule.ranks, schedule.stages)
        self._effects = effects
        self._live = 0
        self._versions = [int(rank in schedule.placement.holders(stage)) for stage in range(schedule.stages)]

    def run(self, slot: int, action: Action) -> None:
        self._live += self._effects.activation_bytes(action)
        self._versions[action.stage] += self._effects.versions(action)
        self.recorder.record(slot, action, self._live, self._versions, (float(slot), slot + 1.0))
        if size := self._effects.bytes_sent(action):
            self.recorder.sent(slot, action, size)


def simulate(schedule: Schedule, costs: StageCosts, steps: int) -> Trace:
    """Run `steps` training steps of the schedule, from the initial parameters, and return the trace of all ranks.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    return simulate_slots(schedule, costs, schedule.slots(range(steps)))


def simulate_slots(schedule: Schedule, costs: StageCosts, slots: Iterable[Slot]) -> Trace:
    """Run the first slots of the schedule and return the trace of all ranks, in which a slot is a second.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    effects = Effects(schedule, costs)
    devices = [_Device(rank, schedule, effects) for rank in range(schedule.ranks)]
    for slot in slots:
        for action in sorted(slot.actions, key=lambda action: action.op is not Op.RECEIVE):  # as in a rank's program
            devices[action.rank].run(slot.number, action)
    return Trace.merged(schedule.micro_batches, schedule.stages, [device.recorder.finish() for device in devices])
