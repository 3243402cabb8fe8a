"""When the norm of all gradients of a training step is known, for clipping by it.

The norm over all stages is known when the last sum of a training step is complete. On the cyclic timeline that is the
sum of stage 0, in slot 2c((t+1)M - 1) + 2S-1. If no micro-batch reads theta[t+1] earlier (`dp`, `cdp_v1`), an update
can wait for the norm until its version is read. With `cdp_v2`, micro-batches read the last stages earlier, so each
stage is clipped by its own norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from cdp_repro.schedule.actions import Slot
from cdp_repro.schedule.meaning import made_from
from cdp_repro.schedule.program import Program
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.schedule_spec import Spec
from cdp_repro.schedule.values import Kind


def clips_globally(schedule: Schedule) -> bool:
    """Whether no micro-batch reads a new version before all sums of the step that makes it are complete."""
    rule = schedule.rule
    return rule.longest == 0 or rule.least >= 1


def can_clip(program: Program) -> bool:
    """Whether each norm by which gradients are clipped is known where, and before, it is needed."""
    if clips_globally(program.schedule):
        return knows_norms_in_time(program)
    return not program.schedule.placement.is_sharded  # no rank has all of a stage's gradient


def knows_norms_in_time(program: Program) -> bool:
    """Whether each sum is complete, on the rank that tells the others, before any rank reads what the step makes.

    Where ranks exchange gradients, each adds them as late as it needs them: it would wait for a sum that it adds later
    itself. Collectives complete sums on no rank in particular.
    """
    return all(_knows_in_time(program.schedule, *sample) for sample in program.samples())


def _knows_in_time(schedule: Schedule, first_step: int, slots: Sequence[Slot]) -> bool:
    """Whether that holds in a run from `first_step`, before which all sums are complete."""
    told: dict[int, dict[int, tuple[int, int]]] = {}
    _, first_version = schedule.ahead(first_step)
    for slot in slots:
        for action in slot.actions:
            for value in action.reads:
                if value.kind == Kind.PARAMETERS and value.number > first_version:
                    known = told.get(value.number, {}).values()
                    here = [k for k, rank in known if k < slot.number or rank == action.rank]
                    if len(here) < schedule.stages:
                        return False
            for value in action.writes:
                version = made_from(schedule, value) if action.op.sums_gradients else None
                if version is not None and teller(schedule, version, value.stage) == action.rank:
                    told.setdefault(version, {})[value.stage] = slot.number, action.rank
    return True


def teller(schedule: Schedule, version: int, stage: int) -> int:
    """Return the rank that completes the sum of which a stage's version is made, and tells its norm.

    It is the rank of the last micro-batch of the sum if that is a holder, else the first holder.
    """
    return schedule.holder_read(version * schedule.sizes.summed - 1, stage)


def refusal(schedule: Schedule) -> str:
    """Return why a schedule cannot clip by norms, and which settings can on the same sizes."""
    whose = "the norm over all stages" if clips_globally(schedule) else "the norm of each stage"
    why = "adds some gradients only after a new version is read"
    first = ""
    if schedule.spec.collectives:
        why, first = "adds them by collectives, after which no rank in particular has a whole sum", "collectives=false "
    plain = replace(schedule.spec, collectives=False)
    ways = [
        (first, plain, ""),
        (f"{first}placement=single_device", plain.on("single_device"), ""),
        (f"{first}placement=pipeline", plain.on("pipeline"), ""),
        (f"{first}mode=cdp_v2", plain.in_mode("cdp_v2"), ", which clips each stage by itself"),
    ]
    works = [
        f"{way.strip()}{_left_out(schedule.spec, spec)}{note}"
        for way, spec, note in ways
        if way and not schedule.sizes.has_own_clocks and _can_clip(spec)
    ]
    return f"clip_norm with mode={schedule.mode} clips by {whose}, but {schedule} {why}: " + (
        f"use {', or '.join(works)}" if works else "leave clip_norm out"
    )


def _left_out(given: Spec, other: Spec) -> str:
    """Return the sizes that only the given spec has, as settings that leave them out."""
    return "".join(
        f" {each.name}=null"
        for each in fields(Spec)
        if getattr(given, each.name) is not None and getattr(other, each.name) is None
    )


def _can_clip(spec: Spec) -> bool:
    try:
        return can_clip(Program(Schedule.from_spec(spec)))
    except ValueError:
        return False
