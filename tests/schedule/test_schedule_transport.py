"""Which ranks send to which, in which batches on NCCL, and what its order would block."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_check import mutated
from written import CYCLIC, DISTRIBUTED, checked, kinds, lists, schedules, slots_of, written

from cdp_repro.schedule import Action, Op, Program, Schedule, ScheduleError
from cdp_repro.schedule.program_text import read_program, write_program
from cdp_repro.schedule.transport import batches, blocked_on_nccl, directions, edges


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


@given(schedules(placements=DISTRIBUTED), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_run_and_every_drain_uses_only_edges_that_the_program_names(schedule, first, steps):
    program = Program(schedule)
    assert set(edges(program.slots(steps, first))) <= set(program.edges)


# ----------------------------------------------------------------------------------------------- batches on NCCL


def issued(slots, batches_of=batches):
    """By rank, what it issues in order, as the executor does: computes, and batches when all it sends in them is made.

    The naive model: a rank that reads what no batch has brought raises KeyError.
    """
    found, landed, times = defaultdict(list), set(), Counter()
    for slot in slots:
        due = {rank: deque(each) for rank, each in batches_of(slot).items()}
        made = {(a.rank, a.value, a.peer): False for a in slot.actions if a.op is Op.SEND}

        def start(rank, due=due, made=made):
            while due.get(rank) and all(made[a.rank, a.value, a.peer] for a in due[rank][0] if a.rank == rank):
                batch = due[rank].popleft()
                landed.update((rank, a.value) for a in batch if a.peer == rank)
                times.update((rank, a) for a in batch)  # buffers travel again and again
                found[rank].append(frozenset((a, times[rank, a]) for a in batch))

        for rank in due:
            start(rank)
        coming = {(a.peer, a.value) for a in slot.actions if a.op is Op.SEND}
        for action in slot.actions:
            for value in action.reads:
                if (action.rank, value) in coming and (action.rank, value) not in landed:
                    raise KeyError(f"rank {action.rank} reads {value} before its batch has started")
            if action.op is Op.SEND:
                made[action.rank, action.value, action.peer] = True
                start(action.rank)
            elif action.op is not Op.RECEIVE:
                found[action.rank].append(action)
        assert not any(due.values()), "each batch starts in its slot"
    return found


def runs_one_thing_at_a_time(found):
    """Whether all ranks come to their end if each runs what it has issued in turn; a batch needs all of its peers."""
    place = Counter()

    def stands_at(rank, message):
        now = found[rank][place[rank]] if place[rank] < len(found[rank]) else None
        done = any(isinstance(each, frozenset) and message in each for each in found[rank][: place[rank]])
        return done or (isinstance(now, frozenset) and message in now)

    while True:
        moved = False
        for rank in found:
            if place[rank] == len(found[rank]):
                continue
            now = found[rank][place[rank]]
            if not isinstance(now, frozenset) or all(stands_at(r, (a, k)) for a, k in now for r in a.edge):
                place[rank] += 1
                moved = True
        if not moved:
            return all(place[rank] == len(found[rank]) for rank in found)


SMALL = [
    Schedule.build(mode, n, n * c, placement, accumulate=k, replicas=r)
    for n, c, r, k in ((2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 2, 1), (2, 1, 1, 2), (4, 1, 1, 1), (2, 1, 3, 1))
    for mode, placement in itertools.product(("dp", *CYCLIC), DISTRIBUTED)
]


@pytest.mark.parametrize("schedule", SMALL, ids=str)
def test_no_rank_waits_for_ever_though_each_runs_one_thing_at_a_time(schedule):
    slots = written(schedule, 3)
    found = issued(slots)
    assert runs_one_thing_at_a_time(found)
    assert blocked_on_nccl(slots) is None
    both_ends = Counter(a for things in found.values() for each in things if isinstance(each, frozenset) for a in each)
    assert set(both_ends.values()) <= {2}, "each message is in one batch at each end"
    assert len(both_ends) == sum(action.op is Op.SEND for slot in slots for action in slot.actions)


def test_neither_does_any_program_that_the_passes_make():
    tried = 0
    for schedule in kinds():
        if schedule.ranks > 1:
            assert blocked_on_nccl(Program(schedule).complete_run) is None, schedule
            tried += 1
    assert tried > 150


@given(schedule=schedules(workers=3, accumulate=2, placements=DISTRIBUTED), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_nor_any_that_the_check_lets_through(schedule, data):
    slots = lists(written(schedule, 2))
    mutated(data.draw, schedule, slots)
    try:
        accepted = checked(schedule, slots_of(slots), 2)
    except ScheduleError:
        return
    if not any(action.op is Op.COLLECTIVE for slot in accepted for action in slot.actions):
        assert runs_one_thing_at_a_time(issued(accepted))
    assert blocked_on_nccl(accepted) is None


@pytest.mark.parametrize(
    ("mode", "placement", "n"), [("dp", "replicated", 3), ("dp", "model_parallel", 4), ("cdp_v2", "zero", 3)]
)
def test_a_program_of_a_file_has_the_batches_of_the_one_that_was_written(mode, placement, n):
    """A file lists the actions rank by rank; the check finds an order in which one process could run them."""
    made = Program(Schedule.build(mode, n, placement=placement))
    read = read_program(write_program(made))
    for first, steps in itertools.product(range(2), (1, 2, 5)):
        slots = read.slots(steps, first)
        assert runs_one_thing_at_a_time(issued(slots))
        exchanged = [{rank: [{*batch} for batch in each] for rank, each in batches(slot).items()} for slot in slots]
        assert exchanged == [
            {rank: [{*batch} for batch in each] for rank, each in batches(slot).items()}
            for slot in made.slots(steps, first)
        ]


def in_one_batch(slot):
    """All messages of a slot that a rank has, without regard to what it reads before it sends."""
    found = defaultdict(list)
    for action in slot.actions:
        if action.op is Op.SEND:
            found[action.rank].append(action)
            found[action.peer].append(action)
    return {rank: [tuple(actions)] for rank, actions in found.items()}


@pytest.mark.parametrize(("placement", "n"), [("replicated", 3), ("model_parallel", 3), ("replicated", 4)])
def test_ranks_that_pass_a_sum_on_in_a_slot_need_several_batches(placement, n):
    slots = written(Schedule.build("dp", n, placement=placement), 3)
    with pytest.raises(KeyError, match="before its batch has started"):
        issued(slots, in_one_batch)
    assert max(len(each) for slot in slots for each in batches(slot).values()) >= 2


def test_batches_in_another_order_hang():
    """What the naive model says of a fault: one rank exchanges its batches in reverse."""
    slots = written(Schedule.build("cdp_v2", 3, placement="pipeline"), 3)
    found = issued(slots)
    exchanged = [k for k, each in enumerate(found[1]) if isinstance(each, frozenset)]
    found[1] = [found[1][exchanged.pop()] if isinstance(each, frozenset) else each for each in found[1]]
    assert not runs_one_thing_at_a_time(found)


def program_of(*ranks):
    """One slot, of which each rank runs its texts in order."""
    return slots_of([[Action.parse(text, rank) for rank, texts in enumerate(ranks) for text in texts]])


F = "F0.m{0}@v0: p0@v0 b0.w0! -> s0.m{0} x1.m{0} b0.w0"
READ = "F1.m{0}@v0: x1.m{0}! p1@v0 b1.w0! -> s1.m{0} d1.m{0} b1.w0"


def labels(found):
    return [sorted(action.label for action in batch) for batch in found]


def test_messages_that_leave_after_as_much_compute_are_exchanged_together():
    (slot,) = program_of(
        ["R x1.m1<1: -> x1.m1", F.format(0), "S x1.m0>1: x1.m0! ->"],
        ["R x1.m0<0: -> x1.m0", F.format(1), "S x1.m1>0: x1.m1! ->"],
    )
    both = [["S x1.m0>1", "S x1.m1>0"]]
    assert {rank: labels(found) for rank, found in batches(slot).items()} == {0: both, 1: both}


def test_what_a_rank_sends_after_it_has_read_comes_in_a_later_batch():
    (slot,) = program_of(
        [F.format(0), "S x1.m0>1: x1.m0! ->", "R d0.m0<1: -> d0.m0"],
        ["R x1.m0<0: -> x1.m0", READ.format(0), "S d0.m0>0: d1.m0! ->"],
    )
    in_turn = [["S x1.m0>1"], ["S d0.m0>0"]]
    assert {rank: labels(found) for rank, found in batches(slot).items()} == {0: in_turn, 1: in_turn}


@pytest.mark.parametrize("follows", [False, True])
def test_a_collective_between_the_ends_of_a_batch_is_refused(follows):
    """Rank 1 sends only after the collective, which rank 0 joins only after it has received."""
    total = "C g0[0:2]: g0[{0}]! -> g0[0:2]"
    texts = (
        [F.format(0), "S x1.m0>1: x1.m0! ->", "R x1.m1<1: -> x1.m1", total.format("0:1")],
        ["R x1.m0<0: -> x1.m0", total.format("1:2"), "S x1.m1>0: x1.m1! ->"],
    )
    if follows:
        texts[1].append(texts[1].pop(1))  # the collective after the send, as on rank 0
    stuck = blocked_on_nccl(program_of(*texts))
    assert (stuck is None) is follows
    assert follows or stuck.label in ("S x1.m0>1", "S x1.m1>0", "C g0[0:2]")


def test_a_file_that_would_hang_is_refused(monkeypatch):
    program = Program(Schedule.build("cdp_v1", 2, placement="pipeline"))
    (send, *_) = (action for slot in program.complete_run for action in slot.actions if action.op is Op.SEND)
    text = write_program(program)
    monkeypatch.setattr("cdp_repro.schedule.program.blocked_on_nccl", lambda slots: send)
    with pytest.raises(ScheduleError, match=r"rank 0, S x1\.m0>1: it would wait for ever on NCCL"):
        read_program(text)


@pytest.mark.parametrize(("placement", "n"), [("replicated", 3), ("zero", 2), ("replicated", 2)])
def test_collectives_in_the_same_order_on_all_ranks_run_and_in_another_do_not(placement, n):
    schedule = Schedule.build("dp", n, placement=placement, collectives=True)
    slots = written(schedule, 3)
    assert edges(slots) == []
    assert blocked_on_nccl(slots) is None
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
