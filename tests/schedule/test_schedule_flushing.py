"""Data parallelism on a pipeline: GPipe and 1F1B for any number of micro-batches and ranks."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from written import placed

from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.meaning import fault_of

BOTH = ("gpipe", "one_f_one_b")
SIZES = [
    (m, s, d) for s, m in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8)) for d in range(1, s + 1) if s % d == 0
]


def build(flush, m, s, d, k=1, **options):
    return Schedule.build("dp", m, s, "pipeline", ranks=d, pipeline_schedule=flush, accumulate=k, **options)


def peaks(slots, ranks):
    """The most micro-batches of which a rank holds what forwards of a stage have saved, by rank and stage."""
    alive, most = Counter(), Counter()
    for slot in slots:
        for action in slot.actions:
            place = action.rank, action.stage
            alive[place] += sum(v.kind == "s" for v in action.writes) - sum(v.kind == "s" for v in action.frees)
            most[place] = max(most[place], alive[place])
    return [{n for (r, _), n in most.items() if r == rank and n} for rank in range(ranks)]


@pytest.mark.parametrize("flush", BOTH)
def test_any_number_of_micro_batches_runs_on_any_number_of_ranks(flush):
    for m, s, d in SIZES:
        schedule = build(flush, m, s, d)
        assert (schedule.ranks, schedule.slots_per_step) == (d, 2 * (m + d - 1) * (s // d))
        slots = Program(schedule).slots(3)
        busy = defaultdict(int)
        for slot in slots:
            ranks = Counter(a.rank for a in slot.actions if a.op.is_compute)
            assert max(ranks.values(), default=0) <= 1 or d == 1, "no rank computes two things in a slot"
            for rank in ranks:
                busy[rank] += 1
        whole = 3 * schedule.slots_per_step
        assert max(placed(slots, Op.FORWARD, Op.BACKWARD).values()) < whole, "each step is flushed"
        if d > 1:
            idle = {(whole - busy[rank], whole) for rank in range(d)}
            assert {share * (m + d - 1) for share, _ in idle} == {whole * (d - 1)}, "idle share (D-1)/(M+D-1)"


@pytest.mark.parametrize("flush", BOTH)
def test_activations_are_of_all_micro_batches_or_of_as_many_as_ranks_follow(flush):
    for m, s, d in SIZES:
        held = peaks(Program(build(flush, m, s, d)).slots(3), d)
        assert held == [{m if flush == "gpipe" else min(m, d - rank)} for rank in range(d)]


@pytest.mark.parametrize(("flush", "k", "r"), itertools.product(BOTH, (1, 2, 3), (1, 2)))
def test_accumulation_and_replicas_change_only_m(flush, k, r):
    schedule = build(flush, 2, 6, 3, k, replicas=r)
    held = peaks(Program(schedule).slots(2), 3 * r)
    assert schedule.slots_per_step == 2 * (2 * k + 2) * 2
    assert held == [{2 * k if flush == "gpipe" else min(2 * k, 3 - rank // r)} for rank in range(3 * r)]


@pytest.mark.parametrize(("n", "c", "flush"), itertools.product((2, 3, 4, 5), (2, 3), BOTH))
def test_several_stages_a_rank_take_no_more_than_one_stage_a_rank(n, c, flush):
    """S = 2N and 3N on N ranks: stages a rank times what one of a rank holds: 30 units for N = 4, S = 12, not 42."""
    total = sum(c * most for held in peaks(Program(build(flush, n, c * n, n)).slots(2), n) for most in held)
    assert total == c * (n * n if flush == "gpipe" else n * (n + 1) // 2)
    if (n, c, flush) == (4, 3, "one_f_one_b"):
        assert total == 30


def test_80_settings_of_several_stages_a_rank_run():
    """N, c, schedule, order, replicas: all are accepted, and no rank computes two things in a slot."""
    tried = 0
    for n, c, flush, order, r in itertools.product((2, 3, 4, 5, 6), (2, 3), BOTH, ("paper", "backward_first"), (1, 2)):
        schedule = Schedule.build("dp", n, c * n, "pipeline", order, replicas=r, pipeline_schedule=flush)
        for slot in Program(schedule).slots(2):
            assert max(Counter(a.rank for a in slot.actions if a.op.is_compute).values(), default=0) <= 1
        tried += 1
    assert tried == 80


@pytest.mark.parametrize(
    ("flush", "rows"),
    [
        ("gpipe", ["FFF....BBB", ".FFF..BBB.", "..FFFBBB.."]),
        ("one_f_one_b", ["FFF..B.B.B", ".FF.BFB.B.", "..FBFBFB.."]),
    ],
)
def test_three_micro_batches_on_three_ranks_are_drawn_as_documented(flush, rows):
    drawn = [["."] * 10 for _ in range(3)]
    for action, slot in placed(Program(build(flush, 3, 3, 3)).slots(1), Op.FORWARD, Op.BACKWARD).items():
        drawn[action.rank][slot] = str(action.op)
    assert ["".join(row) for row in drawn] == rows


@pytest.mark.parametrize("flush", BOTH)
def test_ranks_that_do_not_share_the_stages_equally_are_refused(flush):
    with pytest.raises(ValueError, match="ranks=4 does not divide stages=6: use ranks=1, 2, 3, 6"):
        build(flush, 3, 6, 4)


SLICED = [
    (n, k, slices, s, d, r)
    for n, k, slices, (s, d), r in itertools.product(
        (1, 2, 3), (1, 2), (1, 2, 3, 4), ((1, 1), (2, 2), (4, 2), (3, 3), (6, 2)), (1, 2)
    )
]


def test_slices_fill_a_pipeline_as_micro_batches_do():
    for n, k, slices, s, d, r in SLICED:
        schedule = Schedule.build("terapipe", n, s, "pipeline", ranks=d, slices=slices, accumulate=k, replicas=r)
        m = n * k * slices
        assert (schedule.micro_batches, schedule.ranks) == (m * r, d * r)
        assert schedule.slots_per_step == 2 * (m + d - 1) * (s // d), "idle share (D-1)/(M+D-1)"
        slots = Program(schedule).slots(2)
        assert peaks(slots, d * r) == [{m}] * (d * r)
        when = {
            (action.op, action.stage, action.micro_batch): slot
            for action, slot in placed(slots, Op.FORWARD, Op.BACKWARD).items()
        }
        for (op, stage, micro_batch), slot in when.items():
            before = schedule.sizes.tokens_before(micro_batch)
            if before is not None:
                earlier = when[op, stage, before] < slot
                assert earlier == (op is Op.FORWARD), "forwards from the first tokens on, backwards from the last"


def test_a_slice_of_one_is_gpipe():
    terapipe, gpipe = (
        Schedule.build(mode, 4, 4, "pipeline", ranks=2, **more)
        for mode, more in (("terapipe", {"slices": 1}), ("gpipe", {}))
    )
    assert Program(terapipe).slots(2) == Program(gpipe).slots(2)


@pytest.mark.parametrize(
    ("there", "without", "why"),
    [
        ("F0.m0@v0", "k0.m1", "it must read p0@v0, b0.w0, k0.m1, not p0@v0, b0.w0"),
        ("B1.m1@v0", "h1.m1", "it must read s1.m1, d1.m1, p1@v0, h1.m1"),
    ],
)
def test_a_slice_that_forgets_the_others_is_refused(there, without, why):
    schedule = Schedule.build("terapipe", 1, 2, "pipeline", ranks=2, slices=2)
    actions = {action.label: action for slot in Program(schedule).slots(1) for action in slot.actions}
    action = actions[there]
    less = action._replace(
        reads=tuple(v for v in action.reads if str(v) != without),
        frees=tuple(v for v in action.frees if str(v) != without),
    )
    assert fault_of(action, schedule) is None
    assert why in fault_of(less, schedule)
