"""The first interpreter: runs a schedule on costs instead of tensors."""

from __future__ import annotations

from cdp_repro.schedule.actions import Action, Op, Payload
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.trace import Trace, TraceRecorder


class _Device:
    """The state of one simulated rank: live activation bytes and live parameter versions."""

    def __init__(self, rank: int, schedule: Schedule, costs: StageCosts) -> None:
        self.recorder = TraceRecorder(rank, costs.stages)
        self._schedule = schedule
        self._costs = costs
        self._live = 0
        self._versions = [int(rank in schedule.placement.holders(stage)) for stage in range(costs.stages)]

    def run(self, slot: int, action: Action) -> None:
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
        self.recorder.record(slot, action, self._live, self._versions, (float(slot), slot + 1.0))
        if action.op is Op.SEND and (size := self._costs.sent_bytes(action.payload or Payload.TOTAL, stage)):
            self.recorder.sent(slot, action, size)

    def _received(self, action: Action) -> tuple[int, int]:
        """Return what an input from another rank adds to the bytes that forward and backward take and release."""
        assert action.micro_batch is not None
        if action.stage == 0 or self._schedule.placement.rank_of(action.micro_batch, action.stage - 1) == action.rank:
            return 0, 0
        return self._costs.received_bytes(action.stage)


def simulate(schedule: Schedule, costs: StageCosts, steps: int) -> Trace:
    """Run `steps` training steps of the schedule, from the initial parameters, and return the trace of all ranks.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"the schedule has {schedule.stages} stages but the costs are of {costs.stages}")
    devices = [_Device(rank, schedule, costs) for rank in range(schedule.ranks)]
    for slot in schedule.slots(range(steps)):
        for rank in sorted({action.rank for action in slot.actions}):
            for action in slot.program_of(rank):
                devices[rank].run(slot.number, action)
    return Trace.merged(schedule.micro_batches, schedule.stages, [device.recorder.finish() for device in devices])
