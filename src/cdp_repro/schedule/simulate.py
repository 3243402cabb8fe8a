"""The first interpreter: runs a schedule on costs instead of tensors."""

from __future__ import annotations

from cdp_repro.schedule.actions import Action, Op
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.trace import SlotRecord, Trace, TraceRecorder


class _Device:
    """The state of one simulated rank: live activation bytes and live parameter versions."""

    def __init__(self, rank: int, costs: StageCosts) -> None:
        self.recorder = TraceRecorder(rank, costs.stages)
        self._costs = costs
        self._live = 0
        self._versions = [1] * costs.stages

    def run(self, slot: int, action: Action) -> None:
        if action.op is Op.FORWARD:
            self._live += self._costs.forward_bytes[action.stage]
        elif action.op is Op.BACKWARD:
            self._live -= self._costs.backward_bytes[action.stage]
        elif action.op is Op.UPDATE:
            self._versions[action.stage] += 1
        elif action.op is Op.FREE:
            self._versions[action.stage] -= 1
        self.recorder.record(slot, action, self._live, self._versions, (float(slot), slot + 1.0))


def simulate(schedule: Schedule, costs: StageCosts, steps: int) -> Trace:
    """Run `steps` training steps of the schedule, from the initial parameters, and return the trace of all ranks.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"the schedule has {schedule.stages} stages but the costs are of {costs.stages}")
    devices = [_Device(rank, costs) for rank in range(schedule.ranks)]
    for slot in schedule.slots(range(steps)):
        for action in slot.actions:
            for rank in schedule.placement.ranks_of(action):
                devices[rank].run(slot.number, action)
    records: list[SlotRecord] = [record for device in devices for record in device.recorder.finish()]
    records.sort(key=lambda record: (record.slot, record.rank))
    return Trace(schedule.workers, schedule.stages, tuple(records))
