"""Slots against the closed forms of the timelines; laziness; bounded memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import SLOT_ORDERS, Op, Schedule

MODES = ("dp", "cdp_v1", "cdp_v2")

sizes = st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda nc: (nc[0], nc[0] * nc[1]))
modes = st.sampled_from(MODES)
orders = st.sampled_from(SLOT_ORDERS)


def placed(slots):
    """{(op, micro-batch or version, stage): slot}, every action once."""
    where = {}
    for slot in slots:
        for action in slot.actions:
            key = (action.op, action.micro_batch if action.op.is_compute else action.version, action.stage)
            assert key not in where
            where[key] = slot.number
    return where


@given(sizes, modes, orders, st.integers(1, 4), st.integers(0, 5), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_every_forward_and_backward_is_in_the_slot_of_the_closed_form(size, mode, order, steps, start, first_slot):
    (n, s), c = size, size[1] // size[0]
    schedule = Schedule.build(mode, n, s, slot_order=order)
    where = placed(schedule.slots(range(start, start + steps), first_slot))
    expected = {}
    for t, i, j in itertools.product(range(steps), range(n), range(s)):
        # counted from the first micro-batch of the program, which starts in first_slot
        begin = 2 * s * t if mode == "dp" else 2 * c * (t * n + i)
        m = (start + t) * n + i
        expected[Op.FORWARD, m, j] = first_slot + begin + j
        expected[Op.BACKWARD, m, j] = first_slot + begin + 2 * s - 1 - j
    assert {key: slot for key, slot in where.items() if key[0].is_compute} == expected


@given(sizes, modes, orders, st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_stage_is_updated_right_after_the_backward_of_the_last_worker(size, mode, order, steps):
    (n, s), c = size, size[1] // size[0]
    where = placed(Schedule.build(mode, n, s, slot_order=order).slots(range(steps)))
    updates = {key[1:]: slot for key, slot in where.items() if key[0] is Op.UPDATE}
    last_start = (lambda t: 2 * s * t) if mode == "dp" else (lambda t: 2 * c * (t * n + n - 1))
    assert updates == {(t + 1, j): last_start(t) + 2 * s - 1 - j for t in range(steps) for j in range(s)}
    if mode != "dp" and s == n:  # the form of design.md, section 1
        assert updates == {(t + 1, j): 2 * n * t + 4 * n - 3 - j for t in range(steps) for j in range(s)}


@given(st.integers(1, 6), st.sampled_from(("cdp_v1", "cdp_v2")), orders)
@settings(deadline=None, max_examples=30)
def test_in_the_steady_state_every_stage_has_exactly_one_worker_in_every_slot(n, mode, order):
    steps = 4
    for slot in Schedule.build(mode, n, slot_order=order).slots(range(steps)):
        users = Counter(action.stage for action in slot.actions if action.op.is_compute)
        assert max(users.values()) == 1
        if 2 * (n - 1) <= slot.number < 2 * n * steps:  # all workers have started and none has ended
            assert users == Counter(range(n))


@given(sizes, modes, orders)
@settings(deadline=None, max_examples=30)
def test_a_worker_computes_one_thing_a_slot_and_a_stage_has_one_user_unless_dp(size, mode, order):
    n, s = size
    for slot in Schedule.build(mode, n, s, slot_order=order).slots(range(3)):
        computes = [action for action in slot.actions if action.op.is_compute]
        assert max(Counter(action.micro_batch % n for action in computes).values()) == 1
        if mode != "dp":
            assert max(Counter(action.stage for action in computes).values()) == 1


@given(sizes, modes, orders)
@settings(deadline=None, max_examples=30)
def test_order_inside_a_slot(size, mode, order):
    n, s = size
    for slot in Schedule.build(mode, n, s, slot_order=order).slots(range(3)):
        ops = [action.op for action in slot.actions if action.op.is_compute]
        assert ops == sorted(ops, key=("BF" if order == "backward_first" else "FB").index)
        for op in (Op.FORWARD, Op.BACKWARD):
            batches = [action.micro_batch for action in slot.actions if action.op is op]
            assert batches == sorted(batches)


@given(sizes, modes)
@settings(deadline=None, max_examples=30)
def test_gradients_of_a_stage_are_ready_in_the_order_of_the_workers(size, mode):
    n, s = size
    ready = defaultdict(list)
    for slot in Schedule.build(mode, n, s).slots(range(3)):
        for action in slot.actions:
            if action.op is Op.BACKWARD:
                ready[action.micro_batch // n, action.stage].append(action.micro_batch % n)
    assert all(workers == list(range(n)) for workers in ready.values())
    assert len(ready) == 3 * s


@given(sizes, modes, st.integers(0, 7))
@settings(deadline=None, max_examples=30)
def test_slot_numbers_are_consecutive_from_the_first(size, mode, first_slot):
    numbers = [slot.number for slot in Schedule.build(mode, *size).slots(range(3), first_slot)]
    assert numbers == list(range(first_slot, first_slot + len(numbers)))


def test_no_steps_no_slots():
    for mode in MODES:
        assert list(Schedule.build(mode, 3).slots(())) == []


@given(sizes, modes, orders)
@settings(deadline=None, max_examples=30)
def test_the_program_of_the_single_device_is_the_whole_schedule(size, mode, order):
    schedule = Schedule.build(mode, *size, slot_order=order)
    assert schedule.ranks == 1
    assert list(schedule.program(0, range(3), 5)) == list(schedule.slots(range(3), 5))


# ---------------------------------------------------------------------------------------------------- laziness


@given(sizes, modes)
@settings(deadline=None, max_examples=30)
def test_a_step_is_pulled_only_when_its_first_forward_is_due(size, mode):
    (n, s), pulled = size, []

    def steps():
        for step in range(4):
            pulled.append(step)
            yield step

    seen = set()
    for slot in Schedule.build(mode, n, s).slots(steps()):
        seen |= {action.micro_batch // n for action in slot.actions if action.op.is_compute}
        assert set(pulled) == seen
    assert pulled == [0, 1, 2, 3]


def test_nothing_is_pulled_before_the_first_slot_is_asked_for():
    def steps():
        raise AssertionError("pulled")
        yield 0

    for mode in MODES:
        Schedule.build(mode, 3).slots(steps())
        Schedule.build(mode, 3).program(0, steps())


@pytest.mark.parametrize("mode", MODES)
def test_endless_steps_give_endless_slots(mode):
    slots = list(itertools.islice(Schedule.build(mode, 2).slots(itertools.count()), 500))
    assert [slot.number for slot in slots] == list(range(500))


@pytest.mark.parametrize("mode", [*MODES, [[3, 1], [0, 2]]])
def test_memory_does_not_grow_with_the_number_of_steps(mode):
    schedule = Schedule.build(mode, 2)

    def peak(steps):
        tracemalloc.start()
        try:
            for _ in schedule.slots(range(steps)):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = (min(peak(steps) for _ in range(3)) for steps in (50, 600))  # the interpreter fills caches, too
    assert long < short + 8000, "a kept slot costs some 500 bytes; 550 more steps have 2200 or more slots"


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), orders)
@settings(max_examples=30)
def test_accumulation_runs_one_worker_after_the_other_with_fresh_parameters(n, c, replicas, order):
    stages = c * n
    schedule = Schedule.build("accumulation", n, stages, slot_order=order, replicas=replicas)
    for slot in schedule.slots(range(3)):
        worker, phase = divmod(slot.number, 2 * stages)
        compute = [action for action in slot.actions if action.op.is_compute]
        assert {a.micro_batch // replicas for a in compute} == {worker} and len(compute) == replicas
        assert {a.stage for a in compute} == {min(phase, 2 * stages - 1 - phase)}
        assert {a.version for a in compute} == {worker // n}
    assert schedule.mode.slots_per_step == 2 * stages * n


def test_accumulation_needs_one_device():
    with pytest.raises(ValueError, match="use placement=single_device"):
        Schedule.build("accumulation", 2, placement="replicated")
