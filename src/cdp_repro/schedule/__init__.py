"""Schedules as data: pure Python, no torch.

`generators` write which worker computes what in which slot; `passes` add parameter versions, updates and
frees; `validation` proves the result; `Schedule` chains them into one lazy program per rank, which `simulate`
interprets with costs and the engine's executor interprets with tensors.
"""

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.placement import PLACEMENTS, Placement
from cdp_repro.schedule.rules import MODES, Mode, resolve_mode
from cdp_repro.schedule.schedule import SLOT_ORDERS, Schedule
from cdp_repro.schedule.simulate import simulate
from cdp_repro.schedule.trace import Message, SlotRecord, Trace, TraceRecorder
from cdp_repro.schedule.validation import ScheduleError

__all__ = [
    "MODES",
    "PLACEMENTS",
    "SLOT_ORDERS",
    "Action",
    "Message",
    "Mode",
    "Op",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Slot",
    "SlotRecord",
    "StageCosts",
    "Trace",
    "TraceRecorder",
    "resolve_mode",
    "simulate",
]
