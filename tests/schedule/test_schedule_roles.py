"""The permutation of ranks from one training step to the next."""

from __future__ import annotations

import itertools

import pytest
from written import CYCLIC, DISTRIBUTED

from cdp_repro.schedule import PLACEMENTS, Program, Schedule, add_placement
from cdp_repro.schedule.placements import Placement
from cdp_repro.schedule.roles import Roles


class Scattered(Placement):
    """Micro-batches 0, 1 on rank 0 and 2 on rank 1, then the other way: the work of a rank does not move as a whole."""

    name = "scattered"
    ranks = 2

    def holders(self, stage):
        return range(2)

    def rank_of(self, micro_batch, stage):
        return (0, 0, 1, 0, 1, 1)[micro_batch % 6]


@pytest.mark.parametrize(
    ("mode", "n", "c", "k", "r"), itertools.product(["dp", *CYCLIC], [1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 2])
)
def test_a_step_later_each_role_is_played_by_the_rank_that_its_micro_batches_come_to(mode, n, c, k, r):
    for name in DISTRIBUTED:
        schedule = Schedule.build(mode, n, n * c, name, accumulate=k, replicas=r)
        roles, step, rank_of = Roles(schedule), schedule.micro_batches, schedule.placement.rank_of
        for ahead in (0, 1, 2, 5):
            later = roles.after(ahead) or int
            assert sorted(map(later, range(schedule.ranks))) == list(range(schedule.ranks)), "a permutation"
            for m, j in itertools.product(range(2 * step), range(schedule.stages)):
                assert later(rank_of(m, j)) == rank_of(m + ahead * step, j)
        for rank in range(schedule.ranks):
            cycle = roles.cycle(rank)
            assert cycle[0] == rank and len({*cycle}) == len(cycle)
            turns = [(roles.after(steps) or int)(rank) for steps in range(1, len(cycle) + 1)]
            assert turns == [*cycle[1:], rank]
        if name in ("replicated", "zero", "pipeline"):
            assert roles.are_fixed


@pytest.mark.parametrize(("mode", "n", "k", "r"), itertools.product(CYCLIC, [2, 3, 4, 5], [1, 2, 3], [1, 2]))
def test_the_period_of_model_parallel_is_one_step(mode, n, k, r):
    """Ranks take turns, and still nothing but their names differs between two steps."""
    program = Program(Schedule.build(mode, n, placement="model_parallel", accumulate=k, replicas=r))
    run, _ = program.run_from(0)
    assert len(run.fill) <= 2
    assert sum(a.op.is_compute for slot in run.period for a in slot.actions) == 2 * n * n * k * r
    if n > 2 and (n * k) % (n - 1):
        assert not program.roles.are_fixed


def test_three_ranks_that_share_four_micro_batches_turn_by_one():
    roles = Program(Schedule.build("cdp_v2", 4, placement="model_parallel")).roles
    assert roles.cycle(0) == (0,)
    assert roles.cycle(4) == (4, 5, 6)  # stage 1: micro-batch 0 is on rank 4, 4 on rank 5
    assert [roles.after(steps)(4) for steps in (1, 2, 3, 4)] == [5, 6, 4, 5]


def test_a_placement_without_a_permutation_is_refused():
    add_placement(Scattered)
    try:
        schedule = Schedule.build("dp", 3, placement="scattered")
        with pytest.raises(ValueError, match=r"the work of rank 0 is on ranks 0 and 1; it must move as a whole"):
            Roles(schedule)
        with pytest.raises(ValueError, match="must move as a whole"):
            Program(schedule)
    finally:
        del PLACEMENTS["scattered"]
