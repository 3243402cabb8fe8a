"""Which rank computes what, and who holds what."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import prove
from written import CYCLIC, checked, schedules, written

from cdp_repro.schedule import PLACEMENTS, Op, Program, Schedule, ScheduleError, Spec, add_placement
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.placements import Pipeline, Placement


class TwoHolders(Placement):
    """A placement that is not ours: all stages on two ranks, whatever the number of workers."""

    name = "two_holders"
    ranks = 2

    def holders(self, stage):
        return range(2)


class Paired(Pipeline):
    """Another: the first and the last stage on one rank, as no pipeline on the cyclic timeline can have them."""

    name = "paired"
    ranks = 2

    def holders(self, stage):
        rank = stage % 2
        return range(rank, rank + 1)


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_the_number_of_devices(mode, n):
    ranks = {name: Schedule.build(mode, n, placement=name).ranks for name in PLACEMENTS}
    stages = n * n if mode == "dp" else n * (n + 1) // 2
    assert ranks == {
        "single_device": 1, "replicated": n, "zero": n, "pipeline": n, "model_parallel": stages,
        "parameter_server": n + 1,
    }  # fmt: skip


def test_servers_share_the_stages_and_compute_nothing():
    placement = Schedule.build("dp", 3, 5, "parameter_server", servers=2).placement
    assert placement.ranks == 5
    assert [[*placement.holders(stage)] for stage in range(5)] == [[3], [3], [3], [4], [4]]
    assert {placement.rank_of(m, stage) for m in range(12) for stage in range(5)} == {0, 1, 2}


@pytest.mark.parametrize("servers", [0, 6])
def test_a_server_has_at_least_a_stage(servers):
    with pytest.raises(ValueError, match=f"servers={servers} for stages=5: use servers=1 to 5"):
        Schedule.build("dp", 3, 5, "parameter_server", servers=servers)


def test_sizes_of_another_placement_are_refused_and_left_out_where_a_job_moves():
    with pytest.raises(ValueError, match="servers=2 is for placement=parameter_server; placement=zero derives its"):
        Schedule.build("dp", 2, placement="zero", servers=2)
    job = Spec("dp", 4, 4, "parameter_server", servers=2)
    assert job.on("zero") == Spec("dp", 4, 4, "zero")
    assert job.on("parameter_server") == job


@pytest.mark.parametrize(("mode", "n", "r"), product(["dp", *CYCLIC], [1, 2, 3], [1, 2]))
def test_micro_batches_take_turns_on_the_holders_or_stay_with_their_worker(mode, n, r):
    for name in PLACEMENTS:
        schedule = Schedule.build(mode, n, 2 * n, name, replicas=r)
        for m, j in product(range(12 * n * r), range(2 * n)):
            rank, holders = schedule.placement.rank_of(m, j), schedule.placement.holders(j)
            assert 0 <= holders[0] <= holders[-1] < schedule.ranks
            lends = name in ("zero", "parameter_server")
            assert rank == (m % (n * r) if lends or name == "replicated" else holders[m % len(holders)])
            if not lends:
                assert rank in holders


def test_zero_spreads_its_stages_evenly_and_a_pipeline_has_consecutive_ones():
    zero = Schedule.build("cdp_v2", 3, 6, "zero", replicas=2).placement
    assert [zero.holders(j) for j in range(6)] == [range(j, j + 1) for j in range(6)]
    pipeline = Schedule.build("dp", 2, 6, "pipeline", ranks=3, replicas=2).placement
    assert [list(pipeline.holders(j)) for j in range(6)] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]


@given(size=st.integers(0, 10**6), ranks=st.integers(1, 100))
@settings(derandomize=True)
def test_shards_are_the_whole_and_cut_no_value(size, ranks):
    parts = [part_of(size, rank + 1, 2 * ranks) for rank in range(2 * ranks)]
    assert [byte for part in parts for byte in (part.start, part.stop)][1:-1:2] == [part.start for part in parts][1:]
    assert sum(map(len, parts)) == size
    assert all(len(later) <= len(earlier) <= size / (2 * ranks) + 16 for earlier, later in pairwise(parts))
    assert all(part.stop % 16 == 0 for part in parts if part.stop < size)


@given(schedule=schedules(workers=3), parts=st.lists(st.integers(1, 3), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_program_is_valid_over_drains_and_every_action_has_one_rank(schedule, parts):
    step, computes = 0, []
    for part in parts:
        for slot in checked(schedule, written(schedule, part, step), part, step):
            computes += [(a.op, a.stage, a.micro_batch) for a in slot.actions if a.op.is_compute]
            assert all(0 <= a.rank < schedule.ranks for a in slot.actions)
            assert Counter(slot.actions).most_common(1)[0][1] == 1 if slot.actions else True
        step += part
    assert sorted(computes) == sorted(
        (op, j, m) for op in (Op.FORWARD, Op.BACKWARD) for j in range(schedule.stages)
        for m in range(step * schedule.micro_batches)
    )  # fmt: skip


@pytest.mark.parametrize(("n", "mode"), [(n, "dp") for n in (1, 2)] + [(n, m) for n in (1, 2, 3, 4, 6) for m in CYCLIC])
def test_the_passes_work_for_a_placement_on_two_ranks_and_any_number_of_workers(n, mode):
    add_placement(TwoHolders)
    try:
        schedule = Schedule.build(mode, n, placement="two_holders")
        slots = written(schedule, 4)
        assert sum(action.op is Op.UPDATE for slot in slots for action in slot.actions) == 2 * n * 4
        prove(schedule, slots, 4)
        if n <= 2:
            assert Program(schedule).slots(4) == checked(schedule, slots, 4)
        else:
            with pytest.raises(ScheduleError, match="rank 0 would compute two things in one slot"):
                Program(schedule)
    finally:
        del PLACEMENTS["two_holders"]
