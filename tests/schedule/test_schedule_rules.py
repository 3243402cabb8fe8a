"""Staleness: what the cyclic timeline can serve, which versions are read, and how long they live."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import SLOT_ORDERS, Op, Schedule, ScheduleError, resolve_mode


def freshest(n, s):
    """The smallest staleness by design.md: 0 exactly where c*i + j >= c*(N-1)."""
    c = s // n
    return [[0 if c * i + j >= c * (n - 1) else 1 for j in range(s)] for i in range(n)]


sizes = st.tuples(st.integers(1, 4), st.integers(1, 2)).map(lambda nc: (nc[0], nc[0] * nc[1]))


@st.composite
def feasible(draw):
    """(N, S, a matrix that is nowhere below the smallest staleness)."""
    n, s = draw(sizes)
    extra = draw(st.lists(st.lists(st.integers(0, 3), min_size=s, max_size=s), min_size=n, max_size=n))
    return n, s, [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(freshest(n, s), extra, strict=True)]


def staleness_of(mode, n, s):
    if isinstance(mode, str):
        return {"dp": [[0] * s] * n, "cdp_v1": [[1] * s] * n, "cdp_v2": freshest(n, s)}[mode]
    return mode


rules = st.one_of(
    feasible(), st.tuples(sizes, st.sampled_from(("dp", "cdp_v1", "cdp_v2"))).map(lambda sm: (*sm[0], sm[1]))
)


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 6), range(1, 4)))
def test_the_named_rules_are_the_paper_s(n, c):
    for mode in ("dp", "cdp_v1", "cdp_v2"):
        assert [list(row) for row in resolve_mode(mode, n, c * n).staleness] == staleness_of(mode, n, c * n)
    if c == 1:
        v2 = resolve_mode("cdp_v2", n, n).staleness
        assert all((v2[i][j] == 0) == (i + j >= n - 1) for i in range(n) for j in range(n))


@pytest.mark.parametrize(("n", "c"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (2, 3)])
def test_fresh_is_possible_exactly_where_the_inequality_says(n, c):
    s = c * n
    for i, j in itertools.product(range(n), range(s)):
        matrix = [[1] * s for _ in range(n)]
        matrix[i][j] = 0
        if c * i + j >= c * (n - 1):
            Schedule.build(matrix, n, s)
            continue
        with pytest.raises(ScheduleError) as refusal:
            Schedule.build(matrix, n, s)
        message = str(refusal.value)
        wanted = 2 * c * (n + i) + j  # the forward of worker i in step 1, the first to ask for version 1
        made = 2 * c * (n - 1) + 2 * s - 1 - j  # the backward of worker N-1 in step 0
        assert made >= wanted
        for part in (
            f"(worker {i}, stage {j})",
            f"slot {wanted}, F{j}.m{n + i}@v1",
            f"only after slot {made}: it exists from slot {made + 1} on",
            "Staleness 1 works",
            "cdp_v2",
            "worker 0",  # the grid
        ):
            assert part in message, f"{part!r} is missing from:\n{message}"
        assert re.search(rf"^slot .*\b{wanted}$", message, re.MULTILINE), "the grid ends at the failing slot"
        if c == 1:
            assert made == 4 * n - 3 - j


@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_cdp_v2_is_the_pointwise_smallest(n, c):
    s, v2 = c * n, freshest(n, c * n)
    Schedule.build(v2, n, s)
    for i, j in itertools.product(range(n), range(s)):
        if v2[i][j]:
            smaller = [list(row) for row in v2]
            smaller[i][j] = 0
            with pytest.raises(ScheduleError):
                Schedule.build(smaller, n, s)


@pytest.mark.parametrize(("n", "c"), itertools.product(range(1, 5), range(1, 3)))
def test_fully_fresh_is_refused_on_the_cyclic_timeline_unless_there_is_one_worker(n, c):
    matrix = [[0] * (c * n)] * n
    if n == 1:
        Schedule.build(matrix, n, c * n)
    else:
        with pytest.raises(ScheduleError):
            Schedule.build(matrix, n, c * n)
    Schedule.build("dp", n, c * n)


def test_the_eight_by_four_command_of_the_authors_is_refused_with_sizes_that_work():
    with pytest.raises(ValueError, match=r"stages=4 is not a multiple of workers=8: use stages=8"):
        Schedule.build("cdp_v2", 8, 4)


@given(rules, st.sampled_from(SLOT_ORDERS), st.integers(0, 6))
@settings(deadline=None, max_examples=50)
def test_versions_are_read_as_the_rule_says_and_live_from_update_to_last_reader(rule, order, start):
    """An independent bookkeeping of versions over the program: made, read, freed, kept after the drain."""
    n, s, mode = rule
    d = staleness_of(mode, n, s)
    steps = max(map(max, d)) + 3
    oldest = [max(row[j] for row in d) for j in range(s)]
    alive = [set(range(max(0, start - oldest[j]), start + 1)) for j in range(s)]
    made_in = defaultdict(lambda: -1)
    freed, forwards, position = {}, {}, itertools.count()
    last_read = {}  # (stage, version) -> position of its last reader
    for slot in Schedule.build(mode, n, s, slot_order=order).slots(range(start, start + steps)):
        for action in slot.actions:
            now, j, v = next(position), action.stage, action.version
            if action.op.is_compute:
                t, i = divmod(action.micro_batch, n)
                assert v == max(0, t - d[i][j])
                assert v in alive[j]
                assert made_in[j, v] < slot.number, "an update is complete only after its slot"
                if action.op is Op.FORWARD:
                    forwards[action.micro_batch, j] = v
                else:
                    assert forwards.pop((action.micro_batch, j)) == v
                last_read[j, v] = now
            elif action.op is Op.UPDATE:
                assert v - 1 in alive[j] and v not in alive[j]
                alive[j].add(v)
                made_in[j, v] = slot.number
                last_read[j, v - 1] = now
            else:
                assert (j, v) not in freed
                freed[j, v] = now
                alive[j].remove(v)
                assert last_read.get((j, v)) == now - 1, "freed right after its last reader, not before"
            # an update is out of place: where nobody is stale the old version still goes in the same slot
            assert len(alive[j]) <= max(1, oldest[j]) + 1
        assert all(len(alive[j]) <= oldest[j] + 1 for j in range(s))
    end = start + steps
    for j in range(s):
        assert alive[j] == set(range(max(0, end - oldest[j]), end + 1)), "what the next step needs, and no more"
        assert all(freed[j, v] > last_read.get((j, v), -1) for v in range(end) if (j, v) in freed)
    assert not forwards


@given(feasible())
@settings(deadline=None, max_examples=50)
def test_any_matrix_at_or_above_the_smallest_is_accepted(rule):
    n, s, matrix = rule
    schedule = Schedule.build(matrix, n, s)
    assert [list(row) for row in schedule.mode.staleness] == matrix
    assert schedule.mode.timeline == "cyclic"


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("cdp_v3", 3), "did you mean 'cdp_v"),
        (("cdp_v1", 3, 4), "stages=4 is not a multiple of workers=3: use stages=3 or stages=6"),
        (("cdp_v1", 4, 2), "use stages=4"),
        (("cdp_v1", 0), "workers=0"),
        (("cdp_v1", -1), "workers=-1"),
        pytest.param(("cdp_v1", 2, 0), "use stages=2"),
        (("cdp_v1", 2, 2, "nowhere"), "single_device"),
        (("cdp_v1", 2, 2, "single_device", "random"), "backward_first"),
        (([[1, 1]], 2), "2 rows"),
        (([[1, 1], [1]], 2), r"\[\[1, 1\], \[1, 1\]\]"),
        (([[1, 1], [1, -1]], 2), "worker 1 on stage 1 is -1"),
        (([[1, 1.0], [1, 1]], 2), "worker 0 on stage 1 is 1.0"),
        (([[True, 1], [1, 1]], 2), "worker 0 on stage 0 is True"),
    ],
)
def test_refusals_name_a_value_that_works(arguments, needle):
    with pytest.raises(ValueError, match=needle):
        Schedule.build(*arguments)
