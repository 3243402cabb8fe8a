"""Schedules as data: pure Python, no torch.

A `Schedule` is the choice of a timeline, a rule and a placement; its `Program` is the checked actions of all ranks.
docs/architecture.md says what each module does.
"""

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.check import ScheduleError
from cdp_repro.schedule.modes import MODES, Mode, add_mode
from cdp_repro.schedule.placements import PLACEMENTS, Placement, add_placement
from cdp_repro.schedule.program import Program, RankProgram
from cdp_repro.schedule.rules import Fresh, Rule, UniformDelay
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.schedule_spec import (
    COLLECTIVE_PLACEMENTS,
    PIPELINE_SCHEDULES,
    PLACEMENT_SIZES,
    SLOT_ORDERS,
    Spec,
)
from cdp_repro.schedule.timelines import TIMELINES, Straight, Timeline, add_timeline
from cdp_repro.schedule.values import Value

__all__ = [
    "COLLECTIVE_PLACEMENTS",
    "MODES",
    "PIPELINE_SCHEDULES",
    "PLACEMENTS",
    "PLACEMENT_SIZES",
    "SLOT_ORDERS",
    "TIMELINES",
    "Action",
    "Fresh",
    "Mode",
    "Op",
    "Placement",
    "Program",
    "RankProgram",
    "Rule",
    "Schedule",
    "ScheduleError",
    "Slot",
    "Spec",
    "Straight",
    "Timeline",
    "UniformDelay",
    "Value",
    "add_mode",
    "add_placement",
    "add_timeline",
]
