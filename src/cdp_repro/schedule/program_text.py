"""A program as text, to read, edit by hand and run.

    cdp-repro program, format 1
    mode = "cdp_v2"
    workers = 2
    ...

    run from step 0
    fill 0
    rank 0
      0  F0.m0@v0: p0@v0 b0.w0! -> s0.m0 x1.m0 b0.w0
      1  F1.m0@v0: x1.m0! p1@v0 b1.w0! -> s1.m0 d1.m0 b1.w0
    ...
    period 2
    ...
    drain after 1

The text has a header, then the runs. A run has its pieces, and a piece the actions of each rank, with the slot before
each action. Blank lines and text after `//` are ignored. `Program` says what the pieces are.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from cdp_repro.schedule.actions import Action, Slot
from cdp_repro.schedule.check import ScheduleError
from cdp_repro.schedule.program import MAX_STEPS, Piece, Program, Run, begins
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.schedule_spec import Spec, frozen, is_of, kinds, named
from cdp_repro.schedule.values import NUMBER

FIRST_LINE = "cdp-repro program, format 1"
_GRADIENT_BYTES = "gradient_bytes"
_SECTION = re.compile(rf"(?P<kind>run from step|fill|period|drain after) (?P<number>{NUMBER})")
_RANK = re.compile(rf"rank ({NUMBER})")
_ACTION = re.compile(rf"({NUMBER})\s+(.*)")


def write_program(program: Program) -> str:
    """Return a program as text: all of its runs, with all drains."""
    schedule = program.schedule
    header = {**asdict(schedule.spec), _GRADIENT_BYTES: list(schedule.gradient_bytes)}
    lines = [FIRST_LINE, *(f"{name} = {json.dumps(value)}" for name, value in header.items())]
    for first_step, run in program.runs.items():
        lines += ["", f"run from step {first_step}"]
        for number, piece in enumerate(run.fill):
            lines += ["", f"fill {number}", *_piece_lines(piece)]
        lines += ["", f"period {len(run.fill)}", *_piece_lines(run.period)]
        for steps, piece in sorted(run.drains.items()):
            lines += ["", f"drain after {steps}", *_piece_lines(piece)]
    return "\n".join(lines) + "\n"


def _piece_lines(piece: Piece) -> Iterator[str]:
    """Yield a piece rank by rank."""
    by_rank: dict[int, list[str]] = defaultdict(list)
    width = max((len(str(slot.number)) for slot in piece), default=1)
    for slot in piece:
        for action in slot.actions:
            by_rank[action.rank].append(f"  {slot.number:>{width}}  {action}")
    for rank, lines in sorted(by_rank.items()):
        yield f"rank {rank}"
        yield from lines


def read_program(text: str) -> Program:
    """Return the checked program that a text describes.

    Raises:
        ScheduleError: the text is not a program, or the program cannot run or would compute something other than its
            rule; names the line, shows the grid at the fault, and says why.
    """
    header, pieces = _read(text.split("\n"))
    schedule = _schedule(header, sum(map(len, pieces.values())))
    found, longest = sorted({step for step, _, _ in pieces}), schedule.rule.longest
    if len(found) != longest + 1 or found[-1] != longest:
        needed = "one from 0" if longest == 0 else f"one from each of 0 to {longest}"
        raise ScheduleError(f"the file has runs from the steps {found}: {schedule} needs {needed}")
    runs = {step: _run(step, schedule, pieces) for step in found}
    try:
        return Program(schedule, runs)
    except ScheduleError as error:
        raise ScheduleError(f"{_place_of(error, pieces)}{error}") from None


_Pieces = dict[tuple[int, str, int], list[tuple[int, int, Action]]]
"""The number, slot and action of each line of a piece, by the first step of its run, and its kind and number."""


def _read(lines: Sequence[str]) -> tuple[dict[str, Any], _Pieces]:
    """Return the header and the pieces; an error in a line names it."""
    if "\r" in "".join(lines[:2]):
        raise _broken(1, "lines end in CR LF: write the file with LF line ends, as `tr -d '\\r'` does")
    if lines[0].strip() != FIRST_LINE:
        raise _broken(1, f"a program begins with the line {FIRST_LINE!r}; this is {lines[0][:60]!r}")
    header: dict[str, Any] = {}
    pieces: _Pieces = {}
    place: tuple[int, str, int] | None = None
    first_step, rank = -1, -1
    for number, line in enumerate((each.split("//")[0].strip() for each in lines[1:]), start=2):
        if not line:
            continue
        if (section := _SECTION.fullmatch(line)) is not None:
            rank = -1
            if section["kind"] == "run from step":
                first_step, place = int(section["number"]), None
                continue
            if first_step < 0:
                raise _broken(number, f"{line!r} stands before the first `run from step ...`")
            place = first_step, section["kind"], int(section["number"])
            if place in pieces:
                raise _broken(number, f"{line!r} stands twice in the run from step {first_step}")
            pieces[place] = []
        elif first_step < 0:
            name, value = _entry(number, line)
            if name in header:
                raise _broken(number, f"the header has {name} twice")
            header[name] = value
        elif (said := _RANK.fullmatch(line)) is not None:
            rank = int(said[1])
        elif place is None or rank < 0:
            raise _broken(number, f"{line!r} belongs to no rank of a piece: it needs `fill 0` and `rank 0` before it")
        else:
            pieces[place].append(_action(number, line, rank))
    return header, pieces


def _run(first_step: int, schedule: Schedule, pieces: _Pieces) -> Run:
    """Return a run from its pieces."""
    named = {(kind, number): each for (step, kind, number), each in pieces.items() if step == first_step}
    repeating = sum(kind == "fill" for kind, _ in named)
    steps = range(1, repeating + 2)
    needed = [*(("fill", n) for n in range(repeating)), ("period", repeating), *(("drain after", n) for n in steps)]
    if sorted(named) != sorted(needed):
        found, wanted = (", ".join(f"{kind} {number}" for kind, number in each) for each in (named, needed))
        raise ScheduleError(f"the run from step {first_step} has the pieces {found}: it needs {wanted}")
    begin, most = begins(schedule), (2 * schedule.rule.longest + MAX_STEPS) * schedule.slots_per_step

    def piece(kind: str, step: int) -> list[Slot]:
        actions: dict[int, list[Action]] = defaultdict(list)
        reached: dict[int, int] = {}
        """By rank: the slot of its line before."""
        first, end = begin(step), begin(step + 1)
        if is_drain := kind == "drain after":
            end = first + most
        for line, slot, action in named[kind, step]:
            if not first <= slot < end:
                raise _broken(line, f"{kind} {step} has the slots {first} to {end - 1}")
            if slot < (before := reached.get(action.rank, first)):
                raise _broken(line, f"slot {slot} stands after slot {before}: a rank runs slot after slot")
            reached[action.rank] = slot
            actions[slot].append(action)
        slots = range(first, 1 + max(actions, default=first - 1) if is_drain else end)
        return [Slot(number, tuple(actions[number])) for number in slots]

    return Run(
        first_step,
        [piece("fill", step) for step in range(repeating)],
        piece("period", repeating),
        {after: piece("drain after", after) for after in steps},
    )


def _place_of(error: ScheduleError, pieces: _Pieces) -> str:
    """Return how a message begins: with the line of the fault, or else with the piece."""
    if error.piece is None:
        return ""
    for line, slot, action in pieces[error.piece]:
        if (slot, action) == (error.slot, error.action):
            return f"line {line}: "
    first_step, kind, number = error.piece
    return f"run from step {first_step}, {kind} {number}: "


def _entry(number: int, line: str) -> tuple[str, Any]:
    """Return the name and value in a line of the header."""
    name, _, value = (part.strip() for part in line.partition("="))
    known = kinds() | {_GRADIENT_BYTES: tuple[int, ...]}
    if name not in known:
        raise _broken(number, f"the header has no {name!r}: it has {', '.join(known)}")
    try:
        found = frozen(json.loads(value))
    except (ValueError, RecursionError):  # of thousands of brackets
        raise _broken(number, f'{value[:60]!r} is no JSON value of {name}, such as 4 or "zero"') from None
    if not is_of(found, known[name]):
        raise _broken(number, f"{value} is no value of {name}: it is of the type {named(known[name])}, in JSON")
    return name, found


def _schedule(header: dict[str, Any], actions: int) -> Schedule:
    """Return the schedule that a header describes; the file has this many actions."""
    missing = [each.name for each in fields(Spec) if each.default is MISSING and each.name not in header]
    if missing:
        raise ScheduleError(f"the header lacks {', '.join(missing)}")
    sizes = header.pop(_GRADIENT_BYTES, [])
    spec = Spec(**header)
    try:
        # before the schedule is made, and of a huge one even before faults are looked for: either could take for ever;
        # each worker has a micro-batch, unless M is given; with faults, `from_spec` tells the first
        computes = 2 * max(spec.micro_batches or spec.workers, spec.stages)
        if computes <= actions and not spec.faults():
            computes = 2 * spec.sizes.micro_batches * spec.stages
        if computes > actions:
            raise ValueError(
                f"a step of {spec} has at least {computes:,} forwards and backwards, the file {actions} actions"
            )
        return Schedule.from_spec(spec, sizes)
    except ValueError as error:
        raise ScheduleError(f"the header does not describe a schedule: {error}") from None


def _action(number: int, line: str, rank: int) -> tuple[int, int, Action]:
    """Return the line's number, slot and action."""
    found = _ACTION.fullmatch(line)
    if found is None:
        raise _broken(number, f"{line[:60]!r} has no slot in front of its action")
    try:
        return number, int(found[1]), Action.parse(found[2], rank)
    except ValueError as error:
        raise _broken(number, str(error)) from None


def _broken(line: int, fault: str) -> ScheduleError:
    return ScheduleError(f"line {line}: {fault}")
