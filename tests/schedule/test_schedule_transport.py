"""Which ranks send to which, and what NCCL's order would block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_check import mutated
from written import CYCLIC, DISTRIBUTED, checked, lists, schedules, slots_of, written

from cdp_repro.schedule import Action, Op, Program, Schedule, ScheduleError
from cdp_repro.schedule.program_text import read_program, write_program
from cdp_repro.schedule.transport import blocked_on_nccl, directions, edges


def alone(used):
    return [(edge,) for edge in used]


@given(schedules(placements=DISTRIBUTED), st.integers(1, 3))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_edges_are_exactly_those_over_which_something_is_sent(schedule, steps):
    slots = written(schedule, steps)
    sent = {(a.rank, a.peer) for slot in slots for a in slot.actions if a.op is Op.SEND}
    received = {(a.peer, a.rank) for slot in slots for a in slot.actions if a.op is Op.RECEIVE}
    assert edges(slots) == sorted(sent) == sorted(received)
    up, down = ([e for e in sorted(sent) if (e[0] < e[1]) is way] for way in (True, False))
    assert list(directions(sorted(sent))) == [tuple(each) for each in (up, down) if each]


@pytest.mark.parametrize(
    ("mode", "n", "k"),
    [("cdp_v2", 4, 1), ("cdp_v2", 5, 1), ("cdp_v2", 6, 1), ("cdp_v1", 6, 1), ("cdp_v2", 6, 2), ("dp", 3, 1)],
)
def test_a_long_run_uses_the_edges_that_a_program_names_and_no_others(mode, n, k):
    """Ranks of model_parallel take turns: with N = 6 the first steps do not show all edges between 6 and 5 ranks."""
    program = Program(Schedule.build(mode, n, placement="model_parallel", accumulate=k))
    slots = program.slots(32)
    assert program.edges == edges(slots)
    assert sorted(edge for each in program.communicators for edge in each) == program.edges
    if (mode, n, k) == ("cdp_v2", 6, 1):
        assert len(program.edges) == 164
        assert len(edges(program.slots(4))) < 164


def test_every_run_of_a_file_counts():
    """A run from a later step may send elsewhere than the run from step 0."""
    text = write_program(Program(Schedule.build("cdp_v1", 3, placement="pipeline")))
    begin = text.index("run from step 1")
    first, later = text[:begin], text[begin:]
    for old, new in (
        ("  0  S x1.m3>1: x1.m3! ->\n", "  0  S x1.m3>2: x1.m3! ->\n"),
        ("  0  R x1.m3<0: -> x1.m3\n", "  0  R x1.m3<2: -> x1.m3\n"),
        ("rank 2\n", "rank 2\n  0  R x1.m3<0: -> x1.m3\n  0  S x1.m3>1: x1.m3! ->\n"),
    ):
        assert old in later
        later = later.replace(old, new, 1)
    program = read_program(first + later)
    assert {(0, 2), (2, 1)} <= {*program.edges} == {*edges(program.slots(2, 1)), *edges(program.slots(3))}
    assert {edge for each in program.communicators for edge in each} == {*program.edges}


def test_a_run_of_a_file_that_cannot_share_needs_others():
    text = write_program(Program(Schedule.build("cdp_v1", 3, placement="pipeline", accumulate=2)))
    begin = text.index("run from step 1")
    first, later = text[:begin], text[begin:]
    early = ""
    for m, slot in ((7, 2), (8, 4), (9, 6)):
        (line,) = [each for each in later.split("\n") if each.split() == f"{slot} R x1.m{m}<0: -> x1.m{m}".split()]
        later, early = later.replace(f"{line}\n", "", 1), f"{early}  1  R x1.m{m}<0: -> x1.m{m}\n"
    (send,) = [each for each in later.split("\n") if each.split() == ["1", "S", "x2.m6>2:", "x2.m6!", "->"]]
    program = read_program(first + later.replace(f"{send}\n", f"{early}{send}\n", 1))
    assert blocked_on_nccl(program.complete_run, directions(program.edges)) is None, "the run from step 0 could share"
    assert blocked_on_nccl(program.slots(3, 1), directions(program.edges)) is not None
    assert_none_could_be_spared(program, [program.complete_run, program.slots(3, 1)])


@given(schedules(placements=DISTRIBUTED), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_run_and_every_drain_uses_only_edges_that_the_program_names(schedule, first, steps):
    program = Program(schedule)
    assert set(edges(program.slots(steps, first))) <= set(program.edges)
    assert set(program.edges) == {edge for each in program.communicators for edge in each}


@pytest.mark.parametrize(
    ("placement", "n", "r"),
    [(p, n, r) for p in ("replicated", "model_parallel") for n, r in [(3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (1, 3)]],
)
def test_data_parallelism_by_ordered_messages_hangs_with_a_communicator_for_each_direction(placement, n, r):
    schedule = Schedule.build("dp", n, placement=placement, replicas=r)
    slots = Program(schedule).slots(3)
    used = edges(slots)
    assert blocked_on_nccl(slots, directions(used)) is not None
    assert blocked_on_nccl(slots, alone(used)) is None
    assert_none_could_be_spared(Program(schedule), [Program(schedule).complete_run])


@pytest.mark.parametrize("placement", ["replicated", "model_parallel"])
def test_with_two_ranks_it_does_not(placement):
    schedule = Schedule.build("dp", 1, placement=placement, replicas=2)
    slots = Program(schedule).slots(3)
    assert blocked_on_nccl(slots, directions(edges(slots))) is None


def settings_that_share():
    for n, c, r, k, mode in itertools.product((2, 3, 4, 6), (1, 2), (1, 2), (1, 2), CYCLIC):
        for placement in DISTRIBUTED:
            if n * c * r * k <= 8:
                yield Schedule.build(mode, n, n * c, placement, accumulate=k, replicas=r)
    for n, c, flush in itertools.product((2, 3, 4), (1, 2), ("gpipe", "one_f_one_b")):
        for d in (d for d in range(2, n * c + 1) if n * c % d == 0):
            for m in (1, n, n + 3):
                yield Schedule.build("dp", m, n * c, "pipeline", ranks=d, pipeline_schedule=flush)


def test_cyclic_and_pipeline_settings_need_two_communicators_only():
    tried = 0
    for schedule in settings_that_share():
        slots = written(schedule, 3)
        used = edges(slots)
        assert blocked_on_nccl(slots, directions(used)) is None, schedule
        tried += 1
    assert tried > 150


@pytest.mark.parametrize(("ranks", "needed"), [(2, 2), (4, 2), (6, 3)])
def test_chimera_needs_others_than_one_for_each_direction_from_four_ranks_on(ranks, needed):
    program = Program(Schedule.build("chimera", ranks, ranks, "pipeline", ranks=ranks))
    assert len(program.communicators) == needed
    assert (program.communicators == directions(program.edges)) is (ranks == 2)
    assert_none_could_be_spared(program, [program.complete_run])


@pytest.mark.parametrize("mode", ["naive", "interleaved", "zero_bubble", "pipedream", "pipedream_2bw", "ampnet"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_other_pipelines_need_two_communicators(mode, ranks):
    stages = 2 * ranks if mode == "interleaved" else ranks
    program = Program(Schedule.build(mode, ranks, stages, "pipeline", ranks=ranks))
    assert [*program.communicators] == [*directions(program.edges)]


@pytest.mark.parametrize(
    ("mode", "placement", "n"),
    [("cdp_v2", "replicated", 2), ("cdp_v2", "model_parallel", 3), ("cdp_v2", "pipeline", 2), ("gpipe", "pipeline", 2)],
)
def test_three_replicas_need_others_than_one_for_each_direction(mode, placement, n):
    """Their sums are added in order around a ring, as those of three workers of data parallelism."""
    program = Program(Schedule.build(mode, n, placement=placement, replicas=3))
    assert program.communicators != directions(program.edges)
    if placement == "model_parallel":  # whose ranks take turns
        assert [*program.communicators] == alone(program.edges)
    else:
        assert_none_could_be_spared(program, [program.complete_run])


def test_no_communicators_are_searched_where_that_would_take_minutes(monkeypatch):
    program = Program(Schedule.build("dp", 4, placement="replicated"))
    monkeypatch.setattr("cdp_repro.schedule.program.MOST_REPLAYED", 10)
    assert [*program.communicators] == alone(program.edges)


def assert_none_could_be_spared(program, samples):
    """The communicators carry each edge once; nothing hangs, in a long run either; with two as one something would."""
    found = program.communicators
    assert sorted(edge for each in found for edge in each) == program.edges
    assert len(found) < len(program.edges) or len(found) == 2
    assert blocked_on_nccl(program.slots(program.steady_step + 10), found) is None
    for one, other in itertools.combinations(found, 2):
        merged = [*(each for each in found if each not in (one, other)), one + other]
        assert any(blocked_on_nccl(slots, merged) for slots in samples)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "ssp", "async"])
def test_workers_and_servers_need_two_communicators(mode):
    program = Program(Schedule.build(mode, 3, placement="parameter_server", servers=2))
    assert [*program.communicators] == [*directions(program.edges)]


@pytest.mark.parametrize(("mode", "n"), [(mode, n) for mode in CYCLIC for n in (3, 4, 5)])
def test_ranks_that_take_turns_can_share_them_in_all_of_their_roles(mode, n):
    """A direction is no property of a role: so the run is as long as it takes until all ranks are back in theirs."""
    program = Program(Schedule.build(mode, n, placement="model_parallel"))
    cycles = [len(program.roles.cycle(rank)) for rank in range(program.schedule.ranks)]
    longest = next(steps for steps in itertools.count(1) if all(steps % cycle == 0 for cycle in cycles))
    slots = program.slots(longest + 4)
    assert blocked_on_nccl(slots, directions(program.edges)) is None


@given(schedule=schedules(workers=3, accumulate=2, placements=DISTRIBUTED), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_with_a_communicator_an_edge_nothing_that_the_check_lets_through_can_hang(schedule, data):
    slots = lists(written(schedule, 2))
    mutated(data.draw, schedule, slots)
    try:
        checked(schedule, slots_of(slots), 2)
    except ScheduleError:
        return
    assert blocked_on_nccl(slots_of(slots), alone(edges(slots_of(slots)))) is None


def program_of(*ranks):
    """One slot, of which each rank runs its texts in order."""
    return slots_of([[Action.parse(text, rank) for rank, texts in enumerate(ranks) for text in texts]])


F = "F0.m{0}@v0: p0@v0 b0.w0! -> s0.m{0} x1.m{0} b0.w0"
READ = "F1.m{0}@v0: x1.m{0}! p1@v0 b1.w0! -> s1.m{0} d1.m{0} b1.w0"


def test_a_receive_that_is_posted_before_a_send_on_one_communicator_lets_it_wait():
    """Both ranks receive before they send: on one communicator neither send begins, on two both do."""
    slots = program_of(
        ["R x1.m1<1: -> x1.m1", F.format(0), "S x1.m0>1: x1.m0! ->", READ.format(1)],
        ["R x1.m0<0: -> x1.m0", F.format(1), "S x1.m1>0: x1.m1! ->", READ.format(0)],
    )
    assert blocked_on_nccl(slots, directions(edges(slots))) is None
    together = [tuple(edges(slots))]
    stuck = blocked_on_nccl(slots, together)
    assert stuck is not None and stuck.label in ("R x1.m1<1", "R x1.m0<0", "S x1.m0>1", "S x1.m1>0"), (
        "each waits for the others"
    )


def test_compute_that_waits_for_what_the_other_sends_after_it_blocks_whatever_the_communicators():
    slots = program_of(
        ["R x1.m1<1: -> x1.m1", READ.format(1), F.format(0), "S x1.m0>1: x1.m0! ->"],
        ["R x1.m0<0: -> x1.m0", READ.format(0), F.format(1), "S x1.m1>0: x1.m1! ->"],
    )
    assert blocked_on_nccl(slots, alone(edges(slots))) is not None


def test_a_receive_that_stands_behind_compute_waits_for_it():
    """NCCL starts a receive only after the compute issued before it: here that needs what the sender sends next."""
    fine = program_of(
        [F.format(0), "S x1.m0>1: x1.m0! ->", F.format(1), "S x1.m1>1: x1.m1! ->"],
        ["R x1.m0<0: -> x1.m0", "R x1.m1<0: -> x1.m1", READ.format(1), READ.format(0)],
    )
    late = program_of(
        [F.format(0), "S x1.m0>1: x1.m0! ->", "R d0.m0<1: -> d0.m0",
        "B0.m0@v0: s0.m0! d0.m0! p0@v0 -> g0[0:1]", F.format(1),
         "S x1.m1>1: x1.m1! ->"],
        ["R x1.m1<0: -> x1.m1", READ.format(1), "R x1.m0<0: -> x1.m0", READ.format(0), "S d0.m0>0: d1.m0! ->"],
    )  # fmt: skip
    assert blocked_on_nccl(fine, alone(edges(fine))) is None
    assert blocked_on_nccl(late, alone(edges(late))) is not None


@pytest.mark.parametrize(("placement", "n"), [("replicated", 3), ("zero", 2), ("replicated", 2)])
def test_collectives_in_the_same_order_on_all_ranks_run_and_in_another_do_not(placement, n):
    schedule = Schedule.build("dp", n, placement=placement, collectives=True)
    slots = written(schedule, 3)
    assert edges(slots) == []
    assert Program(schedule).communicators == ()
    assert blocked_on_nccl(slots, ()) is None
    broken = lists(slots)
    k, p = next((k, p) for k, each in enumerate(broken) for p, a in enumerate(each) if a.op is Op.COLLECTIVE)
    del broken[k][p]  # one rank takes part in one collective fewer
    with pytest.raises(ScheduleError, match=r"take part|wait for each other"):
        checked(schedule, slots_of(broken), 3)


@pytest.mark.parametrize("placement", DISTRIBUTED)
def test_an_order_that_is_broken_on_purpose_is_refused(placement):
    """Two messages of an edge trade places at one end only."""
    schedule = Schedule.build("cdp_v2", 3, placement=placement)
    slots = lists(written(schedule, 3))
    sends = [(k, p, a) for k, each in enumerate(slots) for p, a in enumerate(each) if a.op is Op.SEND]
    k, p, first = sends[0]
    k2, p2, second = next(s for s in sends[1:] if (s[2].rank, s[2].peer) == (first.rank, first.peer))
    slots[k][p], slots[k2][p2] = second, first
    with pytest.raises(ScheduleError):
        checked(schedule, slots_of(slots), 3)
