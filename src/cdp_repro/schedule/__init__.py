"""Schedules as data: pure Python, no torch.

A `Schedule` is the choice of a timeline, a rule and a placement; its `Program` is the checked actions of all ranks:

    schedule_spec   all that a user chooses, and the sizes (`sizes`) that follow
    modes           a timeline and a rule under one name
    timelines/      the slot of each stage of each micro-batch
    branches        the stages whose outputs a stage reads
    rules           the version of the parameters that a micro-batch reads
    placements      the rank that computes, and the ranks that hold the state
    schedule        the three together
    values, actions what a program is written in
    passes/         forwards and backwards, messages, lent parameters, last reads
    summation/      ways to sum gradients, one per file
    generate        the passes in order: a run, written out
    check, meaning  what must hold of every run
    transport       edges, batches, and NCCL's order
    program         fill, period and drain; the actions of one rank
    program_text    a program as a file
    norms, last_steps   whether gradients can be clipped, and methods against delay work
    forward_only    the path of an evaluation through the ranks
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
