"""Messages of neighbouring stages, of buffers and of lent parameters: each once, from who has it to who needs it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from written import CYCLIC, DISTRIBUTED, kinds, schedules, written

from cdp_repro.schedule import Op, Schedule
from cdp_repro.schedule.values import LENT

STEPS = 3
KINDS = [schedule for schedule in kinds() if schedule.ranks > 1]


@given(schedules(placements=DISTRIBUTED))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_what_moves_is_what_another_rank_reads_next(schedule):
    sent = Counter((str(a.value), a.rank, a.peer) for slot in written(schedule, STEPS) for a in slot.actions
                   if a.op is Op.SEND and a.value.kind in "xd")  # fmt: skip
    rank_of, expected = schedule.placement.rank_of, Counter()
    for m in range(STEPS * schedule.micro_batches):
        for j in range(1, schedule.stages):
            before, after = rank_of(m, j - 1), rank_of(m, j)
            if before != after:
                expected[f"x{j}.m{m}", before, after] += 1
                expected[f"d{j - 1}.m{m}", after, before] += 1
    assert sent == expected


@pytest.mark.parametrize(("n", "k", "r"), [(3, 1, 1), (3, 2, 1), (4, 1, 1), (4, 2, 2), (5, 2, 1)])
@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
def test_buffers_follow_their_worker(mode, n, k, r):
    schedule = Schedule.build(mode, n, placement="model_parallel", accumulate=k, replicas=r)
    lanes, rank_of = schedule.sizes.lanes, schedule.placement.rank_of
    sent = [(a.value.stage, a.value.number, a.rank, a.peer) for slot in written(schedule, STEPS) for a in slot.actions
            if a.op is Op.SEND and a.value.kind == "b"]  # fmt: skip
    moves = [(j, m % lanes, rank_of(m, j), rank_of(m + lanes, j))
             for m in range(STEPS * schedule.micro_batches) for j in range(schedule.stages)]  # fmt: skip
    assert sorted(sent) == sorted(move for move in moves if move[2] != move[3])
    assert bool(sent) == (mode != "dp")


@given(schedules(placements=("replicated", "zero", "pipeline")))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_elsewhere_buffers_stay_with_their_worker(schedule):
    for slot in written(schedule, STEPS):
        assert not [a for a in slot.actions if a.op is Op.SEND and a.value.kind == "b"]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_no_message_waits_for_an_update_but_the_parameters_that_it_makes(kind):
    """Another rank waits for the message, and would wait for the optimizer, too."""
    for slot in written(KINDS[kind], STEPS):
        updated = {}
        for action in slot.actions:
            if action.op is Op.UPDATE:
                updated.setdefault(action.rank, set()).add((action.stage, action.version))
            elif action.op is Op.SEND and action.rank in updated:
                assert (action.value.stage, action.value.version) in updated[action.rank], f"{slot.number}: {action}"
                assert action.value.kind in LENT


@given(schedules(placements=DISTRIBUTED))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_both_ends_of_a_message_stand_in_one_slot_but_for_receives_that_are_early(schedule):
    sends, receives = {}, {}
    for slot in written(schedule, STEPS):
        for action in slot.actions:
            if action.op is Op.SEND:
                assert (action.value, action.rank, action.peer, slot.number) not in sends
                sends.setdefault((action.value, action.rank, action.peer), []).append(slot.number)
            elif action.op is Op.RECEIVE:
                receives.setdefault((action.value, action.peer, action.rank), []).append(slot.number)
    assert sends.keys() == receives.keys()
    for message, slots in sends.items():
        pairs = list(zip(receives[message], slots, strict=True))
        assert all(0 <= sent - ready <= schedule.slots_per_step for ready, sent in pairs)


@given(schedules(workers=4, placements=("zero",)))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_parameters_are_lent_one_slot_before_they_are_read(schedule):
    brought, reads = {}, {}
    for slot in written(schedule, STEPS):
        for action in slot.actions:
            for value in action.writes:
                if value.kind in ("pf", "pb"):
                    brought[value] = slot.number
            for value in action.reads:
                if value.kind in ("pf", "pb"):
                    reads[value] = slot.number
                    assert value in action.frees, "a copy is for one action"
    assert brought == {value: max(0, number - 1) for value, number in reads.items()}


def test_a_rank_alone_sends_nothing():
    for mode in ("dp", "cdp_v1", "cdp_v2", "accumulation"):
        for slot in written(Schedule.build(mode, 3), 2):
            assert not any(a.op.is_message or a.op is Op.COLLECTIVE for a in slot.actions)
