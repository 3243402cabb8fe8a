"""What a program costs a rank, without tensors: the bench `programs`."""

from __future__ import annotations

import time

from cdp_repro.schedule import PLACEMENTS, Program, RankProgram, Schedule

WORKERS = (4, 16, 64, 256)
MODES = ("dp", "cdp_v1", "cdp_v2")
MOST_FORWARDS = 400_000
"""In a hundred steps or fewer, on a single device: what the cost of an action is measured over."""


def programs() -> dict[str, object]:
    """What a program costs a rank: to make and check it, and to shift an action of a later step.

    The start is what no rank can do without: choices to first slot, on one core. The cost of an action should not
    depend on the number of ranks; it is the mean over up to a hundred steps, of a rank that stands for all.
    """
    rows = [_program_row(mode, n, placement) for n in WORKERS for mode in MODES for placement in PLACEMENTS]
    return {"config": "N = S, one core, no tensors", "rows": rows}


def _program_row(mode: str, workers: int, placement: str) -> dict[str, object]:
    begin = time.process_time()
    rank = RankProgram(Program(Schedule.build(mode, workers, placement=placement)), 0)
    next(rank.replay(0, lambda: True))
    started = time.process_time() - begin
    for steps in (5, max(5, min(100, MOST_FORWARDS // workers**2))):  # the first time, the rank picks its actions
        left = iter(range(steps))
        begin = time.process_time()
        actions = sum(len(slot.actions) for slot in rank.replay(0, lambda: next(left, None) is not None))  # noqa: B023
    each = (time.process_time() - begin) / actions
    row = {
        "mode": mode,
        "workers": workers,
        "placement": placement,
        "ranks": rank.schedule.ranks,
        "start_cpu_seconds": round(started, 3),
        "microseconds_per_action": round(1e6 * each, 2),
    }
    print(row, flush=True)
    return row
