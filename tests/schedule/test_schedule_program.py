"""Programs as finite data: what they replay is what the passes would write out, for all ranks and for each."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import defaultdict
from itertools import filterfalse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import CYCLIC, STALE, kinds, of_rank, schedules, written

from cdp_repro.schedule import PLACEMENTS, Op, Program, RankProgram, Schedule, ScheduleError, Slot
from cdp_repro.schedule.generate import generate
from cdp_repro.schedule.passes.frees import add_frees
from cdp_repro.schedule.program import Run, begins
from cdp_repro.schedule.transport import batches
from cdp_repro.schedule.values import gradient_sum


def per_rank(schedule, slots):
    return [
        {s.number: own for s, own in zip(slots, of_rank(slots, r), strict=True) if own} for r in range(schedule.ranks)
    ]


def for_steps(number):
    """Return what says, so many times, that another training step comes."""
    left = iter(range(number))
    return lambda: next(left, None) is not None


def equal_to_the_passes(program, first, steps):
    schedule = program.schedule
    replayed, made = program.slots(steps, first), written(schedule, steps, first)
    assert len(replayed) == len(made)
    assert [slot.number for slot in replayed] == list(range(len(made)))
    assert per_rank(schedule, replayed) == per_rank(schedule, made)


@given(schedule=schedules(workers=4, accumulate=3), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_program_replays_what_the_passes_write_out(schedule, data):
    program = Program(schedule)
    first = data.draw(st.integers(0, schedule.rule.longest + 2))
    fill = len(program.run_from(first)[0].fill)
    equal_to_the_passes(program, first, data.draw(st.integers(0, fill + 4)))


def test_of_every_kind_all_runs_and_lengths_are_replayed():
    for number, schedule in enumerate(kinds()):
        program = Program(schedule)
        firsts = range(schedule.rule.longest + 3)
        first = firsts[number % len(firsts)]
        fill = len(program.run_from(first)[0].fill)
        equal_to_the_passes(program, first, 1 + number % (fill + 4))


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", STALE], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_first_step_and_every_length(mode, placement):
    program = Program(Schedule.build(mode, 3, placement=placement))
    for first in range(program.schedule.rule.longest + 3):
        fill = len(program.run_from(first)[0].fill)
        for steps in range(fill + 5):
            equal_to_the_passes(program, first, steps)


@given(
    schedule=schedules(workers=3, accumulate=2),
    first=st.integers(0, 4),
    steps=st.integers(0, 6),
    slot=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_program_of_a_rank_is_its_part_of_all(schedule, first, steps, slot):
    program = Program(schedule)
    whole = program.slots(steps, first)
    for rank, expected in enumerate(per_rank(schedule, whole)):
        own = RankProgram(program, rank)
        own.next_slot = slot
        replayed = list(own.replay(first, for_steps(steps)))
        assert {s.number - slot: list(s.actions) for s in replayed} == expected
        assert [s.number for s in replayed] == sorted(s.number for s in replayed)
        assert own.next_slot == slot + len(whole)


@pytest.mark.parametrize(("mode", "n", "k"), [("cdp_v2", 4, 1), ("cdp_v1", 5, 1), ("cdp_v2", 4, 2), ("dp", 3, 1)])
def test_ranks_that_take_turns_replay_one_role_after_the_other(mode, n, k):
    program = Program(Schedule.build(mode, n, placement="model_parallel", accumulate=k))
    assert mode == "dp" or max(len(program.roles.cycle(rank)) for rank in range(program.schedule.ranks)) > 2
    for first, steps in ((0, 9), (1, 7), (4, 5)):
        for rank, expected in enumerate(per_rank(program.schedule, written(program.schedule, steps, first))):
            replayed = RankProgram(program, rank).replay(first, for_steps(steps))
            assert {slot.number: list(slot.actions) for slot in replayed} == expected


@given(schedule=schedules(workers=3, accumulate=2), first=st.integers(0, 4), steps=st.integers(0, 6))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_batches_of_a_rank_are_its_own_in_all_of_its_roles(schedule, first, steps):
    program = Program(schedule)
    expected = {slot.number: batches(slot) for slot in program.slots(steps, first)}
    for rank, own in enumerate(per_rank(schedule, program.slots(steps, first))):
        replayed = {
            slot.number: slot for slot in RankProgram(program, rank, in_batches=True).replay(first, for_steps(steps))
        }
        assert {k: list(slot.actions) for k, slot in replayed.items() if slot.actions} == own
        exchanged = {k: list(slot.batches) for k, slot in replayed.items() if slot.batches}
        assert exchanged == {k: found[rank] for k, found in expected.items() if rank in found}


def slots_after_the_end_of_a_step_on_rank_0(program):
    """By brute force: until the last loss of the step is computed, at most; negative if losses come first."""
    sizes, (kinds, _) = program.schedule.sizes, RankProgram(program, 0).finishing
    ends, losses = {}, {}
    for slot in program.slots(program.steady_step + 3):
        for action in slot.actions:
            if action.op is Op.FORWARD and action.stage == program.schedule.stages - 1:
                losses[action.micro_batch // sizes.micro_batches] = slot.number
            if action.rank == 0 and action.op in kinds:
                is_update = action.op is Op.UPDATE
                counted = (
                    (action.version - 1) // sizes.updates if is_update else action.micro_batch // sizes.micro_batches
                )
                ends[counted] = slot.number
    return max(losses[step] - end for step, end in ends.items())


@pytest.mark.parametrize(("mode", "n", "servers"), [("cdp_v1", 4, 1), ("cdp_v2", 3, 2), ("dp", 3, 1), ("cdp_v2", 2, 1)])
def test_a_worker_without_stages_can_finish_a_step_before_the_others_have_computed_their_losses(mode, n, servers):
    program = Program(Schedule.build(mode, n, placement="parameter_server", servers=servers))
    late = slots_after_the_end_of_a_step_on_rank_0(program)
    assert late == n - 2 if mode != "dp" else late < 0
    assert RankProgram(program, 0).losses_late == max(0, late)


def test_that_is_known_of_every_run_of_a_file(monkeypatch):
    """A run of a file that begins at step 1 may be of another kind than the one from step 0."""
    program = Program(Schedule.build("cdp_v1", 4, placement="parameter_server"))
    slots = program.slots(3, 1)

    def is_put_off(action):
        return action.op is Op.FORWARD and action.stage == 3 and action.rank > 0

    put_off = {slot.number + 5: [*filter(is_put_off, slot.actions)] for slot in slots}
    other = [
        slot._replace(actions=(*filterfalse(is_put_off, slot.actions), *put_off.get(slot.number, ()))) for slot in slots
    ]
    monkeypatch.setattr(program, "samples", lambda: iter([(0, program.complete_run), (1, other)]))
    assert RankProgram(program, 0).losses_late == 2 + 5


def test_no_other_rank_can():
    for program in map(Program, kinds()):
        late = slots_after_the_end_of_a_step_on_rank_0(program)
        assert RankProgram(program, 0).losses_late == max(0, late), program.schedule
        assert late < 0 or program.schedule.placement.name == "parameter_server", program.schedule


@given(schedule=schedules(workers=3, accumulate=2))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_step_is_finished_by_the_updates_of_what_a_rank_holds_or_else_by_its_backwards(schedule):
    program, steps = Program(schedule), 5
    slots = program.slots(steps)
    for rank in range(schedule.ranks):
        kinds, number = RankProgram(program, rank).finishing
        held = sum(rank in schedule.placement.holders(j) for j in range(schedule.stages))
        own = [a for each in of_rank(slots, rank) for a in each if a.op in kinds]
        assert (kinds, number) == ({Op.UPDATE}, held) if held else kinds == {Op.BACKWARD, Op.BACKWARD_WEIGHTS}
        if program.roles.are_fixed or held:
            assert len(own) == steps * number
            by_step = defaultdict(int)
            for action in own:
                step = action.version - 1 if held else action.micro_batch // schedule.micro_batches
                by_step[step] += 1
            assert by_step == (dict.fromkeys(range(steps), number) if number else {})


@pytest.mark.parametrize("mode", ["dp", *CYCLIC, STALE], ids=str)
def test_the_program_of_the_single_device_is_the_whole_schedule(mode):
    program = Program(Schedule.build(mode, 3))
    assert program.schedule.ranks == 1
    assert list(RankProgram(program, 0).replay(0, for_steps(3))) == program.slots(3)


@given(schedule=schedules(workers=3, accumulate=2), first=st.integers(0, 3), steps=st.integers(1, 4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_run_that_ends_later_is_the_same_up_to_the_slot_before_the_next_step(schedule, first, steps):
    """What lets a rank begin a step before it knows whether another comes."""
    short, long = generate(schedule, first, steps), generate(schedule, first, steps + 1)
    same = steps * schedule.slots_per_step - 1
    trim = [[[a._replace(frees=()) for a in each.actions] for each in slots[:same]] for slots in (short, long)]
    assert trim[0] == trim[1]
    assert short[:same] == long[:same]


# ------------------------------------------------------------------------------------------- laziness


@given(schedule=schedules(workers=3, accumulate=2))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_step_is_asked_for_only_when_what_depends_on_it_is_due(schedule):
    """The first step at once; each other in the slot in which its piece begins, and not before."""
    program, asked = Program(schedule), []

    def upcoming():
        asked.append(None)
        return len(asked) <= 4

    computed = set()
    for rank in range(schedule.ranks):
        asked.clear()
        for slot in RankProgram(program, rank).replay(0, upcoming):
            computed = {a.micro_batch // schedule.micro_batches for a in slot.actions if a.op.is_compute}
            assert all(step < len(asked) for step in computed), "nothing is computed that was not asked for"
            assert slot.number >= program.begin(len(asked) - 1)
        assert len(asked) == 5


def test_nothing_is_asked_before_the_first_slot_is():
    def upcoming():
        raise AssertionError("asked")

    for mode in ("dp", *CYCLIC):
        RankProgram(Program(Schedule.build(mode, 3)), 0).replay(0, upcoming)


def test_no_steps_no_slots():
    for mode in ("dp", *CYCLIC):
        program = Program(Schedule.build(mode, 3))
        assert program.slots(0) == []
        own = RankProgram(program, 0)
        assert list(own.replay(0, lambda: False)) == []
        assert own.next_slot == 0


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
def test_endless_steps_give_endless_slots(mode):
    program = Program(Schedule.build(mode, 2))
    slots = list(itertools.islice(RankProgram(program, 0).replay(0, lambda: True), 500))
    assert [slot.number for slot in slots] == list(range(500))
    assert list(itertools.islice(program.endless(), 500)) == slots


@pytest.mark.parametrize("mode", ["dp", *CYCLIC, [[3, 1], [0, 2]]], ids=str)
def test_memory_does_not_grow_with_the_number_of_steps(mode):
    program = Program(Schedule.build(mode, 2))
    own = RankProgram(program, 0)

    def peak(steps):
        left = iter(range(steps))
        tracemalloc.start()
        try:
            for _ in own.replay(0, lambda: next(left, None) is not None):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = (min(peak(steps) for _ in range(3)) for steps in (50, 400))  # the interpreter fills caches, too
    assert long < short + 8000, "a kept slot costs some 500 bytes; 350 more steps have 1400 or more slots"


def test_a_rank_keeps_the_actions_of_its_own_roles_only():
    program = Program(Schedule.build("cdp_v2", 8, placement="replicated"))
    own = RankProgram(program, 3)
    left = iter(range(30))
    for slot in own.replay(0, lambda: next(left, None) is not None):
        assert {a.rank for a in slot.actions} == {3}
    assert {role for picked in own._own.values() for role in picked} == {3}


# ------------------------------------------------------------------------------------------- programs that are given


@given(schedule=schedules(workers=3, accumulate=2))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_program_is_its_runs(schedule):
    made = Program(schedule)
    given_ = Program(schedule, made.runs)
    assert sorted(made.runs) == list(range(schedule.rule.longest + 1))
    for first, steps in itertools.product(range(3), (1, 2, 6)):
        assert given_.slots(steps, first) == made.slots(steps, first)
    assert given_.edges == made.edges


def changed(run, piece, change):
    """A run with one action of a piece changed."""
    period = [list(slot.actions) for slot in run.period]
    fill = [[list(slot.actions) for slot in each] for each in run.fill]
    change(period if piece == "period" else fill[0])
    numbers = [slot.number for slot in run.period]
    return Run(
        run.first_step,
        [
            [Slot(s.number, tuple(a)) for s, a in zip(old, new, strict=True)]
            for old, new in zip(run.fill, fill, strict=True)
        ],
        [Slot(number, tuple(actions)) for number, actions in zip(numbers, period, strict=True)],
        dict(run.drains),
    )


@pytest.mark.parametrize(("mode", "placement"), itertools.product(["dp", *CYCLIC], PLACEMENTS))
def test_a_given_program_with_a_fault_in_its_period_is_refused(mode, placement):
    runs = Program(Schedule.build(mode, 3, placement=placement)).runs
    broken = {first: changed(run, "period", lambda slots: slots[-1].pop()) for first, run in runs.items()}
    with pytest.raises(ScheduleError):
        Program(Schedule.build(mode, 3, placement=placement), broken)


@pytest.mark.parametrize("placement", ["pipeline", "replicated", "model_parallel"])
def test_a_period_that_does_not_end_as_it_begins_is_refused(placement):
    """It gets ready for a message of the drain: well and good once, but the next period would do so again."""
    schedule = Schedule.build("cdp_v2", 3, placement=placement)
    made = Program(schedule).runs
    last = len(made[0].fill) + 1
    drain = [list(slot.actions) for slot in made[0].drains[last]]
    moved = next(action for actions in drain for action in actions if action.op is Op.RECEIVE)
    for actions in drain:
        actions[:] = [action for action in actions if action != moved]
    broken = changed(made[0], "period", lambda slots: slots[-1].append(moved))
    numbers = [slot.number for slot in made[0].drains[last]]
    broken.drains[last] = [Slot(number, tuple(actions)) for number, actions in zip(numbers, drain, strict=True)]
    with pytest.raises(ScheduleError, match="the period of the run from step 0 does not end as it begins"):
        Program(schedule, {**made, 0: broken})


def test_runs_and_drains_that_are_not_given_are_not_made():
    schedule = Schedule.build("cdp_v1", 2)
    runs = Program(schedule).runs
    with pytest.raises(ValueError, match=r"the program has no run from step 1: it has runs from \[0\]"):
        Program(schedule, {0: runs[0]}).slots(2, 1)
    short = Run(0, runs[0].fill, runs[0].period, {max(runs[0].drains): runs[0].drains[max(runs[0].drains)]})
    if len(runs[0].drains) > 1:
        with pytest.raises(ValueError, match="the program has no drain after 1 steps from step 0"):
            Program(schedule, {**runs, 0: short})


def test_a_rule_that_cannot_be_served_is_refused_by_its_program_not_by_its_schedule():
    schedule = Schedule.build([[0, 0], [0, 0]], 2)
    with pytest.raises(ScheduleError, match="Staleness 0 of"):
        Program(schedule)


def with_sums_that_travel_long(schedule, fill):
    """Runs of a given program, in which the sum of stage 0 over the first micro-batch is received a step later.

    In the fill it is sent late, and so is open for 4 slots at most, as in the first period. From then on it is sent
    when it is there, and open for 7 slots from each period to the next.
    """
    begin, period = begins(schedule), schedule.slots_per_step

    def edited(first_step, steps):
        slots = [[action.freeing(()) for action in slot.actions] for slot in generate(schedule, first_step, steps)]
        slots += [[] for _ in range(2 * period)]

        def move(is_it, to, at_front=False):
            (found,) = [(number, each) for number, slot in enumerate(slots) for each in slot if is_it(each)]
            slots[found[0]].remove(found[1])
            slots[to].insert(0 if at_front else len(slots[to]), found[1])

        for step in range(steps - 1):  # in the drain they stay where they are
            first = 2 * (first_step + step)
            part, total = gradient_sum(0, range(first, first + 1)), gradient_sum(0, range(first, first + 2))
            if step + 1 < fill:
                move(lambda a, part=part: a.op is Op.SEND and a.value == part, (step + 2) * period - 2)
            later = [
                lambda a, part=part: a.op is Op.RECEIVE and a.value == part,
                lambda a, total=total: a.op is Op.ADD and a.value == total,
                lambda a, total=total: a.op is Op.UPDATE and total in a.reads,
            ]
            drains = step + 2 == steps
            for is_it in later[::-1] if drains else later:
                move(is_it, (step + 2) * period + (-1 if drains else 2), at_front=drains)
        while not slots[-1]:
            slots.pop()
        return [
            Slot(number, tuple(actions))
            for number, actions in enumerate(add_frees(slots, schedule.held_after(first_step + steps)))
        ]

    runs = {}
    for first in range(schedule.rule.longest + 1):
        long = edited(first, fill + 5)
        pieces = [long[begin(step) : begin(step + 1)] for step in range(fill + 1)]
        drains = {steps: edited(first, steps)[begin(steps) :] for steps in range(1, fill + 2)}
        runs[first] = Run(first, pieces[:fill], pieces[fill], drains)
    return runs


def test_a_message_that_is_open_for_too_long_from_one_period_to_the_next_is_refused():
    """From the fill to the first period it is not: on gloo such a program hangs in its second period."""
    schedule = Schedule.build([[2, 2], [2, 2]], 2, 2, "parameter_server", servers=2)
    with pytest.raises(ScheduleError, match=r"R g0\[6:7\]<0: its send stands 7 slots before it.*at most 4") as failure:
        Program(schedule, with_sums_that_travel_long(schedule, fill=4))
    assert failure.value.piece == (0, "period", 4)
