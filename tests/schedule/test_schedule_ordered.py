"""Pipelines whose ranks have an order of their own: interleaved, zero-bubble, Chimera."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import prove
from written import placed

from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines.ordered import Chimera, Interleaved, Ordered, ZeroBubble

COMPUTES = [op for op in Op if op.is_compute]


def tasks(timeline):
    """(slot, rank) of all that is computed in a training step."""
    return [
        (slot, rank) for rank in range(timeline.ranks) for slot in (slot_of(timeline, t) for t in timeline.order(rank))
    ]


def slot_of(timeline, task):
    op, i, j = task
    if op is Op.FORWARD:
        return timeline.forward(i, j)
    return timeline.backward_weights(i, j) if op is Op.BACKWARD_WEIGHTS else timeline.backward(i, j)


def idle(timeline):
    found = tasks(timeline)
    assert len(set(found)) == len(found), "no rank computes two things in a slot"
    assert max(slot for slot, _ in found) + 1 == timeline.period
    return timeline.period * timeline.ranks - len(found), timeline.period * timeline.ranks


@pytest.mark.parametrize(("d", "groups", "v"), itertools.product(range(2, 9), (1, 2, 3, 4), (1, 2, 3)))
def test_interleaving_makes_the_bubble_as_much_smaller_as_the_chunks(d, groups, v):
    m = d * groups
    timeline = Interleaved(Sizes(d * v, m, pipeline_ranks=d))
    assert timeline.period == 2 * (v * m + d - 1)
    lost, all_slots = idle(timeline)
    assert lost * (v * m + d - 1) == all_slots * (d - 1)


@pytest.mark.parametrize(("d", "m"), [(d, m) for d in range(2, 9) for m in (*range(d, 20), 32)])
def test_a_split_backward_leaves_a_third_of_the_bubble(d, m):
    timeline = ZeroBubble(Sizes(d, m, pipeline_ranks=d))
    assert timeline.period == 3 * m + d - 1
    lost, all_slots = idle(timeline)
    assert lost * (3 * m + d - 1) == all_slots * (d - 1)


@pytest.mark.parametrize(("d", "m"), [(d, m) for d in (2, 4, 6, 8) for m in (*range(d, 20, 2), 32)])
def test_two_directions_leave_half_of_the_bubble(d, m):
    timeline = Chimera(Sizes(d, m, pipeline_ranks=d))
    assert timeline.period == 2 * m + d - 2
    lost, all_slots = idle(timeline)
    assert lost * (2 * m + d - 2) == all_slots * (d - 2)


def kept(slots, ranks):
    """The most (micro-batch, stage) of which a rank keeps what forwards saved."""
    alive, most = Counter(), [0] * ranks
    for slot in slots:
        for action in slot.actions:
            alive[action.rank] += sum(v.kind in "sw" for v in action.writes) - sum(v.kind in "sw" for v in action.frees)
            most[action.rank] = max(most[action.rank], alive[action.rank])
    return most


@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 9)])
def test_a_zero_bubble_pipeline_keeps_no_more_than_one_micro_batch_a_rank(d, m):
    assert max(kept(Program(Schedule.build("zero_bubble", m, d, "pipeline", ranks=d)).slots(2), d)) <= d


@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 6), (4, 4), (4, 8), (6, 6)])
def test_two_directions_keep_no_more_than_d_micro_batches(d, m):
    assert max(kept(Program(Schedule.build("chimera", m, d, "pipeline", ranks=d)).slots(2), d)) <= d


@st.composite
def schedules(draw):
    d = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["interleaved", "zero_bubble", "chimera", "naive"]))
    placement = draw(st.sampled_from(["pipeline", "single_device"]))
    order = draw(st.sampled_from(["paper", "backward_first"]))
    if mode == "chimera":
        d = 2 * draw(st.integers(1, 2))
        n, s, r, k = 2 * draw(st.integers(1, 3)), d, 1, draw(st.integers(1, 2))
    else:
        n = d * draw(st.integers(1, 2)) if mode == "interleaved" else draw(st.integers(1, 5))
        s, r, k = d * draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ranks = {"ranks": d} if placement == "pipeline" else {}
    return Schedule.build(mode, n, s, placement, order, replicas=r, accumulate=k, **ranks)


@given(schedules(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_programs_are_proved(schedule, steps, first):
    prove(schedule, Program(schedule).slots(steps, first), steps, first)


GRIDS = {
    Interleaved: (Sizes(4, 2, pipeline_ranks=2), 12),
    ZeroBubble: (Sizes(3, 3, pipeline_ranks=3), 11),
    Chimera: (Sizes(4, 4, pipeline_ranks=4), 10),
}


@pytest.mark.parametrize("kind", GRIDS)
def test_grids_are_drawn_as_documented(kind):
    sizes, _ = GRIDS[kind]
    timeline = kind(sizes)
    cells = defaultdict(str)
    for rank in range(timeline.ranks):
        for op, i, j in timeline.order(rank):
            label = {Interleaved: f"{op}{j}.{i}", ZeroBubble: str(op), Chimera: f"{op}{i}"}[kind]
            cells[rank, slot_of(timeline, (op, i, j))] = label
    width = max(2, *map(len, cells.values()))
    rows = [
        f"        rank {rank}  " + " ".join(f"{cells[rank, slot]:<{width}}" for slot in range(timeline.period))
        for rank in range(timeline.ranks)
    ]
    documented = [line for line in kind.__doc__.splitlines() if line.lstrip().startswith("rank ")]
    assert documented == [row.rstrip() for row in rows]


class Deadlocked(Ordered):
    """Rank 0 wants the backward before it has sent the forward."""

    name = "deadlocked"

    def order(self, rank):
        return [(Op.BACKWARD, 0, rank), (Op.FORWARD, 0, rank)]


def test_orders_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="the orders of deadlocked wait for each other"):
        _ = Deadlocked(Sizes(2, 1, pipeline_ranks=2)).period


@pytest.mark.parametrize(
    ("mode", "n", "s", "d", "options", "said"),
    [
        ("interleaved", 6, 8, 4, {}, "6 of them are not a multiple of ranks=4: use workers=4 or workers=8"),
        ("chimera", 4, 3, 3, {}, "not stages=3: use stages=4"),
        ("chimera", 4, 4, 2, {}, "use ranks=4, not 2"),
        ("chimera", 3, 4, 4, {}, "not 3: use workers=4"),
        ("chimera", 4, 4, 4, {"replicas": 2}, "use replicas=1"),
        ("chimera", 1, 4, 4, {"accumulate": 2}, "workers=1 and 2 micro-batches share one: use workers=2"),
        ("chimera", 5, 4, 4, {"micro_batches": 6}, "workers=5 and 6 micro-batches share one: use workers=6"),
    ],
)
def test_what_an_order_cannot_have_is_refused_with_a_value_that_works(mode, n, s, d, options, said):
    with pytest.raises(ValueError, match=said):
        Schedule.build(mode, n, s, "pipeline", ranks=d, **options)


@pytest.mark.parametrize("mode", ["naive", "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "chimera"])
def test_a_system_for_pipelines_is_refused_elsewhere(mode):
    with pytest.raises(
        ValueError, match=f"mode={mode} is not for placement=replicated: use placement=single_device or"
    ):
        Schedule.build(mode, 4, 4, "replicated")


def test_naive_model_parallelism_leaves_all_ranks_but_one_idle():
    slots = Program(Schedule.build("naive", 3, 4, "pipeline", ranks=4)).slots(2)
    busy = placed(slots, *COMPUTES)
    assert sorted(busy.values()) == list(range(2 * 3 * 2 * 4)), "one compute in each slot, on one rank"
