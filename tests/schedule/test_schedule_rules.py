"""Staleness: what the cyclic timeline can serve, which versions are read, and how long they live."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import ORDERS, checked, smallest_staleness, written

from cdp_repro.schedule import Op, Program, Schedule, ScheduleError


def freshest(n, s):
    """The smallest staleness without accumulation by design.md: 0 exactly where c(i+1) + j >= S."""
    c = s // n
    return [[0 if c * i + j >= c * (n - 1) else 1 for j in range(s)] for i in range(n)]


def matrix_of(mode, n, s, k=1):
    return [list(row) for row in Schedule.build(mode, n, s, accumulate=k).rule.matrix]


sizes = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)).map(lambda x: (x[0], x[0] * x[1], x[2]))


@st.composite
def feasible(draw):
    """(N, S, k, a matrix that is nowhere below the smallest staleness)."""
    n, s, k = draw(sizes)
    row = st.lists(st.integers(0, 3), min_size=s, max_size=s)
    extra = draw(st.lists(row, min_size=n * k, max_size=n * k))
    smallest = smallest_staleness(n, s, k)
    return n, s, k, [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(smallest, extra, strict=True)]


def staleness_of(mode, n, s, k):
    turns = n * k
    named = {"dp": [[0] * s] * turns, "cdp_v1": [[1] * s] * turns, "cdp_v2": smallest_staleness(n, s, k)}
    return named[mode] if isinstance(mode, str) else mode


rules = st.one_of(
    feasible(), st.tuples(sizes, st.sampled_from(("dp", "cdp_v1", "cdp_v2"))).map(lambda sm: (*sm[0], sm[1]))
)


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 6), range(1, 4)))
def test_the_named_rules_are_the_paper_s(n, c):
    s = c * n
    assert matrix_of("dp", n, s) == [[0] * s] * n
    assert matrix_of("cdp_v1", n, s) == [[1] * s] * n
    assert matrix_of("cdp_v2", n, s) == freshest(n, s)
    if c == 1:
        assert all((freshest(n, n)[i][j] == 0) == (i + j >= n - 1) for i in range(n) for j in range(n))


# ------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(("n", "c", "k"), itertools.product(range(1, 7), range(1, 4), range(1, 5)))
def test_freshest_is_the_smallest_staleness_that_the_timeline_can_serve(n, c, k):
    assert matrix_of("cdp_v2", n, c * n, k) == smallest_staleness(n, c * n, k)


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 6), range(1, 3)))
def test_so_it_is_for_any_number_of_micro_batches_and_a_pipeline_never_idles(n, c):
    for m in range(n, 2 * n + 4):
        newest, late = (
            Schedule.build(mode, n, c * n, "pipeline", micro_batches=m) for mode in ("cdp_v2", "pipedream_2bw")
        )
        assert [list(row) for row in newest.rule.matrix] == smallest_staleness(n, c * n, m=m)
        assert [list(row) for row in late.rule.matrix] == [[1] * (c * n)] * m
        for schedule in (newest, late):
            period = Program(schedule).run_from(0)[0].period
            busy = [action.rank for slot in period for action in slot.actions if action.op.is_compute]
            assert schedule.slots_per_step == 2 * c * m
            assert all(busy.count(rank) == 2 * c * m for rank in range(n)), "a rank computes in every slot"


@pytest.mark.parametrize(("n", "c", "k"), itertools.product(range(1, 7), range(1, 4), range(1, 5)))
def test_the_share_of_stale_reads_falls_as_one_over_m(n, c, k):
    s, turns = c * n, n * k
    matrix = matrix_of("cdp_v2", n, s, k)
    assert {d for row in matrix for d in row} <= {0, 1}
    for j in range(s):
        assert sum(row[j] for row in matrix) / turns == (ceil((s - j) / c) - 1) / turns


@pytest.mark.parametrize(
    ("n", "c", "k"), [(1, 1, 1), (1, 3, 2), (2, 1, 1), (2, 2, 3), (3, 1, 2), (3, 2, 1), (4, 1, 1), (4, 1, 2), (2, 3, 2)]
)
def test_any_smaller_staleness_is_refused_with_the_place_the_slot_and_when_it_exists(n, c, k):
    s, turns = c * n, n * k
    smallest = smallest_staleness(n, s, k)
    Program(Schedule.build(smallest, n, s, accumulate=k))
    for i, j in itertools.product(range(turns), range(s)):
        if not smallest[i][j]:
            assert c * (i + 1) + j >= s
            continue
        matrix = [list(row) for row in smallest]
        matrix[i][j] = 0
        schedule = Schedule.build(matrix, n, s, accumulate=k)
        with pytest.raises(ScheduleError) as refusal:
            Program(schedule)
        message = str(refusal.value)
        wanted = 2 * c * (turns + i) + j  # its forward in step 1, the first to ask for version 1
        made = 2 * c * (turns - 1) + 2 * s - 1 - j  # the last backward of step 0
        assert made >= wanted
        assert message.startswith(f"slot {wanted}, F{j}.m{turns + i}@v1: "), message
        for part in (
            f"(micro-batch {i}, stage {j})",
            f"only after slot {made}: it exists from slot {made + 1} on",
            "Staleness 1 works",
            "cdp_v2",
            "worker 0",  # the grid
        ):
            assert part in message, f"{part!r} is missing from:\n{message}"
        assert re.search(rf"^slot .*\b{wanted}\b", message, re.MULTILINE), "the grid shows the failing slot"
        assert re.search(rf"^slot .*\b{made + 1}$", message, re.MULTILINE), "and ends when the version exists"
        if c == k == 1:
            assert made == 4 * n - 3 - j


@pytest.mark.parametrize("placement", ["replicated", "zero", "model_parallel", "pipeline"])
@pytest.mark.parametrize(("n", "k"), [(3, 1), (2, 2)])
def test_on_other_placements_it_is_refused_with_the_same_place(n, k, placement):
    matrix = smallest_staleness(n, n, k)
    i, j = 0, n - 2
    assert matrix[i][j] == 1
    matrix[i][j] = 0
    with pytest.raises(ScheduleError, match=r"\(micro-batch 0, stage \d\)"):
        Program(Schedule.build(matrix, n, placement=placement, accumulate=k))


# ------------------------------------------------------------------------------------------- feasibility


@pytest.mark.parametrize(("n", "c"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (2, 3)])
def test_fresh_is_possible_exactly_where_the_inequality_says(n, c):
    s = c * n
    for i, j in itertools.product(range(n), range(s)):
        matrix = [[1] * s for _ in range(n)]
        matrix[i][j] = 0
        schedule = Schedule.build(matrix, n, s)
        if c * i + j >= c * (n - 1):
            Program(schedule)
            continue
        with pytest.raises(ScheduleError, match=rf"\(micro-batch {i}, stage {j}\)"):
            Program(schedule)


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 5), range(1, 3)))
def test_fully_fresh_is_refused_on_the_cyclic_timeline_unless_there_is_one_worker(n, c):
    schedule = Schedule.build([[0] * (c * n)] * n, n, c * n)
    if n == 1:
        Program(schedule)
    else:
        with pytest.raises(ScheduleError):
            Program(schedule)
    Program(Schedule.build("dp", n, c * n))


@given(feasible())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_any_matrix_at_or_above_the_smallest_is_accepted(rule):
    n, s, k, matrix = rule
    schedule = Program(Schedule.build(matrix, n, s, accumulate=k)).schedule
    assert [list(row) for row in schedule.rule.matrix] == matrix
    assert schedule.timeline.name == "cyclic"
    assert schedule.rule.longest == max(map(max, matrix))
    assert list(schedule.rule.largest_by_stage) == [max(column) for column in zip(*matrix, strict=True)]


@given(rules, st.sampled_from(ORDERS), st.integers(0, 6))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_versions_are_read_as_the_rule_says_and_live_from_update_to_last_reader(rule, order, start):
    """An independent bookkeeping of versions over the program: made, read, freed, kept after the drain."""
    n, s, k, mode = rule
    d, turns = staleness_of(mode, n, s, k), n * k
    steps = max(map(max, d)) + 3
    oldest = [max(row[j] for row in d) for j in range(s)]
    alive = [set(range(max(0, start - oldest[j]), start + 1)) for j in range(s)]
    made_in = defaultdict(lambda: -1)
    forwards = {}
    schedule = Schedule.build(mode, n, s, slot_order=order, accumulate=k)
    slots = written(schedule, steps, start)
    checked(schedule, slots, steps, start)
    last_read = {
        value: (slot.number, p)
        for slot in slots for p, action in enumerate(slot.actions) for value in action.reads if value.kind == "p"
    }  # fmt: skip
    for slot in slots:
        for p, action in enumerate(slot.actions):
            j, v = action.stage, action.version
            read = [value.number for value in action.reads if value.kind == "p"]
            freed = [value for value in action.frees if value.kind == "p"]
            if action.op.is_compute:
                t, i = divmod(action.micro_batch, turns)
                assert v == max(0, t - d[i][j])
                assert read == [v] and v in alive[j]
                assert made_in[j, v] < slot.number, "an update is complete only after its slot"
                if action.op is Op.FORWARD:
                    forwards[action.micro_batch, j] = v
                else:
                    assert forwards.pop((action.micro_batch, j)) == v
            else:
                assert action.op is Op.UPDATE
                assert read == [v - 1] and v - 1 in alive[j] and v not in alive[j]
                alive[j].add(v)
                made_in[j, v] = slot.number
            # an update is out of place: where nobody is stale the old version still goes in the same slot
            assert len(alive[j]) <= max(1, oldest[j]) + 1
            for value in freed:
                assert last_read[value] == (slot.number, p), "freed by its last reader, not before"
                alive[j].remove(value.number)
        assert all(len(alive[j]) <= oldest[j] + 1 for j in range(s))
    end = start + steps
    for j in range(s):
        assert alive[j] == set(range(max(0, end - oldest[j]), end + 1)), "what the next step needs, and no more"
    assert not forwards


@pytest.mark.parametrize("replicas", [1, 3])
def test_all_replicas_of_a_micro_batch_read_the_same_version(replicas):
    rule = Schedule.build("cdp_v2", 2, 4, accumulate=2, replicas=replicas).rule
    plain = Schedule.build("cdp_v2", 2, 4, accumulate=2).rule
    for m, j in itertools.product(range(24 * replicas), range(4)):
        assert rule.version(m, j) == plain.version(m // replicas, j)
