"""Schedules as data: pure Python, no torch.

`generators` write which worker computes what in which slot; a `placement` says on which rank, and who owns what;
`passes`, `communication`, `collectives`, `updates` and `pacing` add versions, messages, updates and frees; `validation`
proves the result; `Schedule` chains them into one lazy program per rank, which `simulate` interprets with costs and
the engine's executor interprets with tensors.
"""

from cdp_repro.schedule.actions import Action, MessageKey, Op, Payload, Slot, consumed, result_of
from cdp_repro.schedule.collectives import next_in_ring, ring_bytes
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.parts import part_bytes, part_of
from cdp_repro.schedule.placement import PLACEMENTS, Placement
from cdp_repro.schedule.rules import MODES, Mode, resolve_mode
from cdp_repro.schedule.schedule import COLLECTIVE_PLACEMENTS, PIPELINE_SCHEDULES, SLOT_ORDERS, Schedule
from cdp_repro.schedule.simulate import simulate, simulate_slots
from cdp_repro.schedule.totals import Live, SlotTotals, simulate_totals
from cdp_repro.schedule.trace import Message, SlotRecord, Trace, TraceRecorder
from cdp_repro.schedule.validation import ScheduleError

__all__ = [
    "COLLECTIVE_PLACEMENTS",
    "MODES",
    "PIPELINE_SCHEDULES",
    "PLACEMENTS",
    "SLOT_ORDERS",
    "Action",
    "Live",
    "Message",
    "MessageKey",
    "Mode",
    "Op",
    "Payload",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Slot",
    "SlotRecord",
    "SlotTotals",
    "StageCosts",
    "Trace",
    "TraceRecorder",
    "consumed",
    "next_in_ring",
    "part_bytes",
    "part_of",
    "resolve_mode",
    "result_of",
    "ring_bytes",
    "simulate",
    "simulate_slots",
    "simulate_totals",
]
