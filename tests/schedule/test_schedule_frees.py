"""Every value is freed by its last reader, and only what the next step needs is held after a drain."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from written import schedules, smallest_staleness, written

from cdp_repro.schedule import Op, Program, Schedule, Value


@given(schedules(), st.integers(0, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_each_value_is_freed_exactly_once_by_its_last_reader(schedule, first):
    steps = 3
    alive = {(rank, v): None for rank, values in schedule.held_after(first).items() for v in values}
    reads = defaultdict(list)
    for slot in written(schedule, steps, first):
        for action in slot.actions:
            for value in action.reads:
                reads[action.rank, value].append((value in action.frees, str(action)))
            for value in action.frees:
                assert all(not freed for freed, _ in reads[action.rank, value][:-1])
                reads[action.rank, value] = []
            for value in action.writes:
                alive[action.rank, value] = None
    left = {place for place, found in reads.items() if found} | {place for place in alive if not reads[place]}
    held = {(rank, v) for rank, values in schedule.held_after(first + steps).items() for v in values}
    assert {place for place, found in reads.items() if found} <= held
    assert held <= left


@given(schedules(), st.integers(0, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_what_is_held_is_what_later_micro_batches_read(schedule, step):
    held = schedule.held_after(step)
    needed = defaultdict(set)
    for j in range(schedule.stages):
        parts = schedule.ranks if schedule.placement.is_sharded else 1
        for rank in schedule.placement.holders(j):
            needed[rank].add(Value("p", j, step).divided(rank + 1, parts))
        for m in range(step * schedule.micro_batches, (step + 5) * schedule.micro_batches):
            rank = schedule.placement.rank_of(m, j)
            own = rank if rank in schedule.placement.holders(j) else schedule.placement.holders(j)[0]
            v = schedule.rule.version(m, j)
            if v <= step:
                needed[own].add(Value("p", j, v).divided(own + 1, parts))
            if m < step * schedule.micro_batches + schedule.sizes.lanes:
                needed[rank].add(Value("b", j, m % schedule.sizes.lanes))
    assert {rank: set(values) for rank, values in held.items()} == needed
    assert all(len(values) == len(set(values)) for values in held.values())


def test_a_version_that_only_one_of_two_ranks_reads_later_is_not_held_by_the_other():
    """Stage 2 is stale by 1, 2 and 0 for the micro-batches of a step, which take turns on ranks 6 and 7."""
    matrix = [[1, 3, 1, 3, 0, 2], [3, 1, 2, 0, 2, 0], [0, 2, 0, 2, 0, 2]]
    assert all(d >= e for a, b in zip(matrix, smallest_staleness(3, 6), strict=True) for d, e in zip(a, b, strict=True))
    schedule = Schedule.build(matrix, 3, 6, "model_parallel")
    versions = [{v.number for v in schedule.held_after(2)[rank] if (v.kind, v.stage) == ("p", 2)} for rank in (6, 7)]
    assert versions == [{1, 2}, {0, 2}]
    Program(schedule).slots(4, 2)


def test_a_version_is_freed_by_the_update_that_replaces_it_where_nobody_is_stale():
    slots = written(Schedule.build("dp", 2), 2)
    updates = [a for slot in slots for a in slot.actions if a.op is Op.UPDATE]
    assert [str(a) for a in updates[:2]] == ["U1@v1: p1@v0! g1[0:2]! -> p1@v1", "U0@v1: p0@v0! g0[0:2]! -> p0@v1"]
