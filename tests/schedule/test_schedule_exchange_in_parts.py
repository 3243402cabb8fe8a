"""Exchanged gradients in parts: everything leaves once, in time, in the order of need; the two ends of each agree."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import built, sums_of
from written import of_rank, placed, written

from cdp_repro.schedule import Op, Program, Schedule, ScheduleError
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.summation import exchange_in_parts, strategy_of
from cdp_repro.schedule.summation.exchange_in_parts import (
    MIN_PART_BYTES,
    departures,
    leaves_in_parts,
    parts_of,
    sum_by_exchange_in_parts,
)

STEPS = 5
MIB = 2**20
RESNET = tuple(round(share * 45 * MIB) for share in (0.01, 0.01, 0.05, 0.19, 0.33, 0.42))
"""About the gradients of six stages of ResNet-18."""


@st.composite
def sized(draw):
    n, r = draw(st.sampled_from([(2, 1), (1, 2)]))
    s = n * draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 40 * MIB), min_size=s, max_size=s))
    modes = ["dp", "cdp_v1", "cdp_v2", [[1 + (i + j) % 3 for j in range(s)] for i in range(n)]]
    return Schedule.build(draw(st.sampled_from(modes)), n, s, "replicated", replicas=r, gradient_bytes=sizes)


@given(schedule=sized(), begin=st.integers(0, 9))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_every_part_leaves_once_and_before_anyone_adds(schedule, begin):
    sizes, parts = schedule.gradient_bytes, parts_of(schedule.gradient_bytes)
    if not leaves_in_parts(schedule):
        parts = (1,) * len(sizes)
    slots, _ = built(schedule, STEPS, begin)
    moved, arrived = Counter(), defaultdict(set)
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.SEND:
                value = action.value
                part = value.part or 1
                assert value.parts == parts[action.stage]
                moved[value.number, action.stage] += len(part_of(sizes[action.stage], part, parts[action.stage]))
                arrived[action.peer, value.number, action.stage].add(part)
            elif action.op is Op.ADD:
                other = next(m for m in action.value.members if m % 2 != action.rank)
                assert arrived[action.rank, other, action.stage] == {*range(1, parts[action.stage] + 1)}
    first = 2 * begin
    assert moved == Counter({(m, j): size for m in range(first, first + 2 * STEPS) for j, size in enumerate(sizes)})
    for j in range(schedule.stages):
        assert sums_of(slots, j, schedule) == {
            (begin + t, rank): [first + 2 * t, first + 2 * t + 1] for t in range(STEPS) for rank in range(2)
        }


def due(schedule, worker, stage):
    """The slot, after a worker's first forward, in which the other rank reads what its gradients make, or computes the
    next of its own: seen in the program."""
    first, other, begins = 2 * 2 + worker, 1 - worker, None
    for slot in written(schedule, STEPS + 3):
        for action in slot.actions:
            if (action.op, action.stage, action.micro_batch) == (Op.FORWARD, 0, first):
                begins = slot.number
            if action.rank != other or action.stage != stage or begins is None or action.micro_batch < 0:
                continue
            reads = action.op is Op.FORWARD and action.version >= 3
            if reads or (action.op is Op.BACKWARD and action.micro_batch >= 6):
                return slot.number - begins
    raise AssertionError


@given(schedule=sized())
@settings(deadline=None, max_examples=20, derandomize=True)
def test_a_rank_sends_a_mean_stage_a_slot_and_what_is_needed_first_first(schedule):
    sizes, parts, stages = schedule.gradient_bytes, parts_of(schedule.gradient_bytes), schedule.stages
    mean = sum(sizes) / stages
    for worker in range(2):
        needed = [due(schedule, worker, stage) for stage in range(stages)]
        gone = {}
        plan = departures(schedule, worker)
        assert len(plan) == sum(parts)
        for departure in plan:
            made = {j for j in range(stages) if 2 * stages - 1 - j <= departure.slot}
            waiting = {(needed[j], j, k) for j in made for k in range(1, parts[j] + 1)} - gone.keys()
            this = needed[departure.stage], departure.stage, departure.part
            assert this == min(waiting), "first what is needed first, and only what there is"
            size = len(part_of(sizes[departure.stage], departure.part, parts[departure.stage]))
            before = sum(size for slot, size in gone.values() if slot == departure.slot)
            assert before == 0 or before + size <= mean or this[0] <= departure.slot + 1
            gone[this] = departure.slot, size


@pytest.mark.parametrize("mode", ["dp", "cdp_v2"])
def test_messages_leave_as_planned_and_the_other_rank_is_ready_in_its_own_backward(mode):
    """In the steady state nothing is forced; worker 0 is half a training step ahead of worker 1."""
    schedule = Schedule.build(mode, 2, 6, "replicated", gradient_bytes=RESNET)
    slots, _ = built(schedule, STEPS)
    begins = {a.micro_batch: slot for a, slot in placed(slots, Op.FORWARD).items() if a.stage == 0}
    sends, receives = defaultdict(list), defaultdict(list)
    for slot in slots:
        for action in slot.actions:
            for op, found in ((Op.SEND, sends), (Op.RECEIVE, receives)):
                if action.op is op:
                    found[action.value.number].append((slot.number, action.stage, action.value.part or 1))
    for m in range(2, 2 * STEPS - 4):
        plan = [(begins[m] + each.slot, each.stage, each.part) for each in departures(schedule, m % 2)]
        ahead = 6 if m % 2 and mode == "cdp_v2" else 0
        assert sends[m] == plan
        assert receives[m] == [(slot - ahead, stage, part) for slot, stage, part in plan]


def test_parts_are_halves_of_the_mean_stage_of_what_is_much_larger():
    assert parts_of(RESNET) == (1, 1, 1, 1, 4, 5)
    assert parts_of([MIB] * 8) == (1,) * 8
    assert parts_of([0, 0]) == (1, 1)
    assert parts_of([1, MIN_PART_BYTES - 1]) == (1, 1), "small parts take longer to begin than to send"
    assert parts_of([1, 3 * MIN_PART_BYTES]) == (1, 3)


@given(st.lists(st.integers(0, 100 * MIB), min_size=1, max_size=8))
@settings(derandomize=True)
def test_parts_cover_the_bytes(sizes):
    for size, parts in zip(sizes, parts_of(sizes), strict=True):
        cut = [part_of(size, part, parts) for part in range(1, parts + 1)]
        assert [byte for part in cut for byte in (part.start, part.stop)][1:-1:2] == [part.start for part in cut][1:]
        assert sum(map(len, cut)) == size


def test_small_gradients_that_are_needed_first_overtake_large_ones():
    """Worker 1's next forward begins with stage 0, whose gradients worker 0 makes last."""
    schedule = Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET)
    first, last = ([departure.stage for departure in departures(schedule, worker)] for worker in range(2))
    assert first == [5, 5, 4, 4, 3, 2, 4, 1, 4, 0, 5, 5, 5]
    assert last == [5, 5, 4, 4, 3, 4, 4, 5, 5, 5, 2, 1, 0], "worker 0's next forward reads only stages 3 to 5 fresh"


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
@pytest.mark.parametrize("sizes", [(), (MIB,) * 6, (100, 1, 1, 1, 1, 1)], ids=["unknown", "even", "small"])
def test_even_and_small_stages_are_sent_as_they_are(mode, sizes):
    plain = Schedule.build(mode, 2, 6, "replicated")
    assert written(Schedule.build(mode, 2, 6, "replicated", gradient_bytes=sizes), 3) == written(plain, 3)


@pytest.mark.parametrize(
    ("placement", "n", "options"),
    [
        ("single_device", 2, {}),
        ("zero", 2, {}),
        ("pipeline", 2, {}),
        ("pipeline", 2, {"replicas": 2}),
        ("model_parallel", 2, {}),
        ("replicated", 3, {}),
        ("replicated", 2, {"accumulate": 2}),
    ],
)
def test_only_two_ranks_that_exchange_everything_send_parts(placement, n, options):
    schedule = Schedule.build("cdp_v2", n, 6, placement, gradient_bytes=RESNET, **options)
    assert all(strategy_of(schedule, j) is not sum_by_exchange_in_parts for j in range(6))
    values = {v for slot in written(schedule, 3) for a in slot.actions for v in (*a.reads, *a.writes, a.value) if v}
    assert {v.parts for v in values} == {1}


def test_what_leaves_in_parts_is_checked_before_anything_starts(monkeypatch):
    plain = Schedule.build("cdp_v2", 2, 6, "replicated")
    assert Schedule.from_spec(plain.spec, RESNET) == Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET)
    monkeypatch.setattr(exchange_in_parts, "_until", lambda *_: [])
    monkeypatch.setattr(exchange_in_parts, "_rest_of", lambda *_: [])
    with pytest.raises(ScheduleError):
        Program(Schedule.from_spec(plain.spec, RESNET))


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
def test_parts_of_real_stages_make_a_program_whose_pieces_repeat(mode):
    program = Program(Schedule.build(mode, 2, 6, "replicated", gradient_bytes=RESNET))
    assert len(program.run_from(0)[0].fill) <= 3
    made, replayed = written(program.schedule, 9), program.slots(9)
    assert len(made) == len(replayed)
    assert all(of_rank(replayed, rank) == of_rank(made, rank) for rank in range(2))


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_parts_leave_when_the_timeline_has_made_them_whatever_it_is(data):
    """A backward in two parts gives its gradients later than one in a part."""
    mode = data.draw(st.sampled_from(["zero_bubble", "gpipe", "one_f_one_b"]))
    stages = data.draw(st.integers(2, 5))
    sizes = tuple(2**20 * size for size in data.draw(st.lists(st.integers(0, 12), min_size=stages, max_size=stages)))
    Program(Schedule.build(mode, 1, stages, "pipeline", ranks=1, replicas=2, gradient_bytes=sizes))
