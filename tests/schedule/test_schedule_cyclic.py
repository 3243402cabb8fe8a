"""The cyclic timeline against its closed forms."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import CYCLIC, ORDERS, placed, written

from cdp_repro.schedule import Op, Program, Schedule, ScheduleError
from cdp_repro.schedule.timelines.cyclic import Cyclic

sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)).map(lambda x: (x[0], x[0] * x[1], x[2]))


@given(sizes, st.sampled_from(CYCLIC), st.sampled_from(ORDERS), st.integers(1, 4), st.integers(0, 5))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_every_forward_and_backward_is_in_the_slot_of_the_closed_form(size, mode, order, steps, start):
    n, s, k = size
    c, turns = s // n, n * k
    slots = written(Schedule.build(mode, n, s, slot_order=order, accumulate=k), steps, start)
    where = {(a.op, a.micro_batch, a.stage): slot for a, slot in placed(slots, Op.FORWARD, Op.BACKWARD).items()}
    expected = {}
    for i, j in itertools.product(range(steps * turns), range(s)):
        m = start * turns + i
        expected[Op.FORWARD, m, j] = 2 * c * i + j  # from the first micro-batch of the run, which starts in slot 0
        expected[Op.BACKWARD, m, j] = 2 * c * i + 2 * s - 1 - j
    assert where == expected


@given(sizes, st.sampled_from(CYCLIC), st.sampled_from(ORDERS), st.integers(1, 4))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_a_stage_is_updated_right_after_the_backward_of_the_last_worker(size, mode, order, steps):
    n, s, k = size
    c, turns = s // n, n * k
    slots = written(Schedule.build(mode, n, s, slot_order=order, accumulate=k), steps)
    updates = {(a.version, a.stage): slot for a, slot in placed(slots, Op.UPDATE).items()}
    form = {(t + 1, j): 2 * c * ((t + 1) * turns - 1) + 2 * s - 1 - j for t in range(steps) for j in range(s)}
    assert updates == form
    if s == n and k == 1:  # the form of design.md, section 1
        assert updates == {(t + 1, j): 2 * n * t + 4 * n - 3 - j for t in range(steps) for j in range(s)}


@given(st.integers(1, 6), st.sampled_from(CYCLIC), st.sampled_from(ORDERS), st.integers(1, 2))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_in_the_steady_state_every_stage_has_exactly_one_worker_in_every_slot(n, mode, order, k):
    steps = 4
    for slot in written(Schedule.build(mode, n, slot_order=order, accumulate=k), steps):
        users = Counter(action.stage for action in slot.actions if action.op.is_compute)
        assert max(users.values()) == 1
        if 2 * (n - 1) <= slot.number < 2 * n * k * steps:  # all workers have started and none has ended
            assert users == Counter(range(n))


@given(sizes, st.sampled_from(CYCLIC))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_a_worker_computes_one_thing_a_slot_and_a_stage_has_one_user(size, mode):
    n, s, k = size
    for slot in written(Schedule.build(mode, n, s, accumulate=k), 3):
        computes = [action for action in slot.actions if action.op.is_compute]
        assert max(Counter(action.micro_batch % n for action in computes).values()) == 1
        assert max(Counter(action.stage for action in computes).values()) == 1


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 6), range(1, 4)))
def test_a_pipeline_takes_any_multiple_of_n_ranks_and_no_others(n, c):
    s = n * c
    for d in (d for d in range(1, s + 1) if s % d == 0):
        if d % n:
            with pytest.raises(ValueError, match=rf"ranks={d} is not a multiple of workers={n}: .* use ranks={n}"):
                Schedule.build("cdp_v2", n, s, "pipeline", ranks=d)
            continue
        schedule = Schedule.build("cdp_v2", n, s, "pipeline", ranks=d)
        assert schedule.ranks == d
        for slot in Program(schedule).slots(2):
            ranks = Counter(a.rank for a in slot.actions if a.op.is_compute)
            assert max(ranks.values(), default=0) <= 1


@pytest.mark.parametrize(("n", "c"), itertools.product(range(2, 5), range(1, 4)))
def test_what_is_refused_on_a_pipeline_really_meets(n, c, monkeypatch):
    """The refusal is not too strict: without it a rank would compute two things in one slot."""
    monkeypatch.setattr(Cyclic, "check", lambda self, placement: None)
    for d in (d for d in range(1, n * c + 1) if n * c % d == 0 and d % n):
        with pytest.raises(ScheduleError, match=r"would compute two things in one slot") if d > 1 else _nothing():
            Program(Schedule.build("cdp_v1", n, n * c, "pipeline", ranks=d))


def _nothing():
    """One rank alone plays all workers in turn: it is a single device."""
    from contextlib import nullcontext

    return nullcontext()
