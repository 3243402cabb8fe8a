"""Schedules as data: pure Python, no torch.

A `Schedule` is the choice of a timeline, a rule and a placement; its `Program` is what all ranks do, checked:

    timelines/      which micro-batch computes which stage in which slot
    branches        which stages read the outputs of which
    rules           which version of the parameters it reads
    placements      on which rank, and who holds the state
    passes/         messages, lent parameters, last reads
    summation/      one way to sum gradients a file
    generate        the passes in their order: a run, written out
    check, meaning  what must hold of every run
    transport       edges, communicators, and NCCL's order
    program         fill, period and drain; the part of one rank
    program_text    a program as a file
    forward_only    the way of an evaluation through the ranks
"""

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.check import ScheduleError
from cdp_repro.schedule.placements import PLACEMENTS
from cdp_repro.schedule.program import Program, RankProgram
from cdp_repro.schedule.schedule import (
    COLLECTIVE_PLACEMENTS,
    MODES,
    PIPELINE_SCHEDULES,
    PLACEMENT_SIZES,
    SLOT_ORDERS,
    Mode,
    Schedule,
    Spec,
    add_mode,
    add_placement,
    add_timeline,
)
from cdp_repro.schedule.timelines import TIMELINES
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
    "Mode",
    "Op",
    "Program",
    "RankProgram",
    "Schedule",
    "ScheduleError",
    "Slot",
    "Spec",
    "Value",
    "add_mode",
    "add_placement",
    "add_timeline",
]
