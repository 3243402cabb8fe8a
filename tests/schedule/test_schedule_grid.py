"""Golden grids of the timelines."""

from __future__ import annotations

import textwrap

import pytest

from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.grid import text_grid
from cdp_repro.schedule.lanes import Lanes

GRIDS = {
    "dp": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        worker 1 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        worker 2 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        update                  U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
    "cdp_v1": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        worker 1           F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        worker 2                     F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0
        update                                      U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
    "cdp_v2": """\
        slot        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0 F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v0 F2v1 B2v1 B1v0 B0v0
        worker 1           F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v0 F1v1 F2v1 B2v1 B1v1 B0v0
        worker 2                     F0v0 F1v0 F2v0 B2v0 B1v0 B0v0 F0v1 F1v1 F2v1 B2v1 B1v1 B0v1
        update                                      U2v1 U1v1 U0v1                U2v2 U1v2 U0v2
        """,
}


def grid(mode, n, steps, width=None, **options):
    return text_grid(Program(Schedule.build(mode, n, **options)).slots(steps), Lanes(n), width)


@pytest.mark.parametrize("mode", GRIDS)
def test_golden_grids_of_three_workers(mode):
    assert grid(mode, 3, 2) == textwrap.dedent(GRIDS[mode]).rstrip()


@pytest.mark.parametrize("mode", GRIDS)
@pytest.mark.parametrize("placement", ["replicated", "zero"])
def test_on_other_placements_workers_do_the_same_and_only_updates_are_later(mode, placement):
    rows = [line.split() for line in grid(mode, 3, 2, placement=placement).splitlines()]
    golden = [line.split() for line in textwrap.dedent(GRIDS[mode]).splitlines()]
    assert rows[1:4] == golden[1:4]
    assert {each for cell in rows[4][1:] for each in cell.split(",")} == {*golden[4][1:]}


def test_grid_in_blocks_of_the_given_width():
    text = grid("cdp_v2", 3, 2, width=50)
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert [len(block) for block in blocks] == [5, 5]
    assert max(map(len, text.splitlines())) <= 50
    whole = grid("cdp_v2", 3, 2).splitlines()
    margin = len("worker 0")
    for row, line in enumerate(whole):
        first, second = (block[row] for block in blocks)
        assert (first.ljust(48) + second[margin:]).rstrip() == line


def test_grid_narrower_than_a_column_still_prints_every_slot():
    text = grid("dp", 2, 1, width=1)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("slot")] == ["0", "1", "2", "3"]


def test_replicas_have_rows_of_their_own_that_are_not_called_workers():
    program = Program(Schedule.build("dp", 1, 2, replicas=2))
    rows = text_grid(program.slots(1), program.schedule.timeline.lanes).splitlines()
    assert [row.split() for row in rows[1:3]] == [
        ["lane", str(lane), "F0v0", "F1v0", "B1v0", "B0v0"] for lane in (0, 1)
    ]


def test_an_empty_grid_is_text_too():
    assert isinstance(text_grid([], Lanes(2)), str)
