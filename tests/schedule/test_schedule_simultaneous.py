"""Data parallelism's timeline against its closed forms."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from written import ORDERS, placed, written

from cdp_repro.schedule import Op, Schedule

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))


@given(sizes, st.sampled_from(ORDERS), st.integers(1, 4), st.integers(0, 5))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_all_workers_compute_the_same_stage_at_once(size, order, steps, start):
    n, s, k = size
    slots = written(Schedule.build("dp", n, s, slot_order=order, accumulate=k), steps, start)
    where = {(a.op, a.micro_batch, a.stage): slot for a, slot in placed(slots, Op.FORWARD, Op.BACKWARD).items()}
    expected = {}
    for i, j in itertools.product(range(steps * n * k), range(s)):
        begin = 2 * s * (i // n)
        expected[Op.FORWARD, start * n * k + i, j] = begin + j
        expected[Op.BACKWARD, start * n * k + i, j] = begin + 2 * s - 1 - j
    assert where == expected


@given(sizes, st.sampled_from(ORDERS), st.integers(1, 4))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_a_stage_is_updated_right_after_the_backward_of_the_last_worker(size, order, steps):
    n, s, k = size
    slots = written(Schedule.build("dp", n, s, slot_order=order, accumulate=k), steps)
    updates = {(a.version, a.stage): slot for a, slot in placed(slots, Op.UPDATE).items()}
    assert updates == {(t + 1, j): 2 * s * (t * k + k - 1) + 2 * s - 1 - j for t in range(steps) for j in range(s)}


@given(sizes)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_a_worker_computes_one_thing_a_slot(size):
    n, s, k = size
    schedule = Schedule.build("dp", n, s, accumulate=k)
    assert schedule.slots_per_step == 2 * s * k
    for slot in written(schedule, 3):
        workers = Counter(action.micro_batch % n for action in slot.actions if action.op.is_compute)
        assert workers == Counter(range(n)), "and none ever waits"
