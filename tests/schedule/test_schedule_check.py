"""Every way to corrupt a program is refused, or it still computes what its rule says; refusals say where and why."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from symbolic import Wrong, prove
from written import CYCLIC, DISTRIBUTED, STALE, checked, kinds, lists, schedules, slots_of, written

from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, Action, Op, Program, Schedule, ScheduleError, Slot, Spec, Value
from cdp_repro.schedule.actions import send
from cdp_repro.schedule.check import Checker
from cdp_repro.schedule.passes.frees import add_frees
from cdp_repro.schedule.placements import SingleDevice
from cdp_repro.schedule.rules import Matrix
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines.timeline import Straight

STEPS = 4
MODES = {"dp": "dp", "cdp_v1": "cdp_v1", "cdp_v2": "cdp_v2", "matrix": STALE}
RESNET = (471859, 471859, 2359296, 8965325, 15571354, 19818086)
everywhere = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
any_mode = st.sampled_from(list(MODES.values()))


def program(mode, placement="single_device", n=3, steps=STEPS, **options):
    schedule = Schedule.build(mode, n, placement=placement, **options)
    return schedule, lists(written(schedule, steps))


def refused(schedule, slots, steps=STEPS):
    """The message of the refusal, which shows the grid; what is refused for its values must not compute its rule."""
    with pytest.raises(ScheduleError) as refusal:
        checked(schedule, slots_of(slots), steps)
    message = str(refusal.value)
    assert re.search(r"^slot +\d", message, re.MULTILINE), message
    rows = schedule.timeline.lanes.names
    assert len(rows) == schedule.sizes.lanes
    assert all(re.search(rf"^{row}\b", message, re.MULTILINE) for row in rows)
    return message


def refused_and_wrong(schedule, slots, steps=STEPS):
    with pytest.raises(Wrong):
        prove(schedule, slots_of(slots), steps)
    return refused(schedule, slots, steps)


def places(slots, keep=lambda action: True):
    return [(k, p) for k, actions in enumerate(slots) for p, action in enumerate(actions) if keep(action)]


def find(slots, label, rank=0):
    return next((k, p) for k, p in places(slots, lambda a: (a.label, a.rank) == (label, rank)))


# ------------------------------------------------------------------------------------------- whatever is changed


def mutated(draw, schedule, slots):
    """One small change of a program, any that a slip of the pen could make."""
    k, p = draw(st.sampled_from(places(slots)))
    action = slots[k][p]
    how = draw(st.sampled_from(
        ["drop", "repeat", "swap", "version", "value", "peer", "free", "keep", "slot", "rank", "write", "part"]
    ))  # fmt: skip
    if how == "drop":
        del slots[k][p]
    elif how == "repeat":
        slots[k].insert(p + 1, action)
    elif how == "swap":
        near = places(slots, lambda other: other.rank == action.rank and other is not action)
        k2, p2 = draw(st.sampled_from(sorted(near, key=lambda place: abs(place[0] - k))[:12] or [(k, p)]))
        slots[k][p], slots[k2][p2] = slots[k2][p2], slots[k][p]
    elif how == "version":
        change = draw(st.sampled_from([-1, 1]))
        slots[k][p] = action._replace(version=action.version + change)
        if draw(st.booleans()):  # and of all that it reads and writes
            new = [
                tuple(v._replace(number=v.number + change) if v.kind == "p" else v for v in each) for each in action[7:]
            ]
            slots[k][p] = Action(*slots[k][p][:7], *new)
    elif how == "value" and action.value is not None:
        other = draw(st.sampled_from(sorted({a.value for actions in slots for a in actions if a.value})))
        swapped = [tuple(other if v == action.value else v for v in each) for each in action[7:]]
        slots[k][p] = Action(*action[:6], other, *swapped)
    elif how == "peer" and action.peer >= 0:
        slots[k][p] = action._replace(peer=draw(st.integers(-1, schedule.ranks)))
    elif how == "free" and len(action.frees) < len(action.reads):
        slots[k][p] = action._replace(frees=action.reads)
    elif how == "keep" and action.frees:
        slots[k][p] = action._replace(frees=action.frees[1:])
    elif how == "slot":
        target = min(max(0, k + draw(st.integers(-8, 8))), len(slots) - 1)
        slots[target].insert(draw(st.integers(0, len(slots[target]))), slots[k].pop(p))
    elif how == "rank":
        slots[k][p] = action._replace(rank=draw(st.integers(-1, schedule.ranks)))
    elif how == "part" and action.op in (Op.SEND, Op.RECEIVE, Op.ADD):
        old = draw(st.sampled_from([*action.reads, *action.writes]))
        part = old.whole.divided(draw(st.integers(1, 2)), draw(st.integers(2, 3)))
        changed = [tuple(part if v == old else v for v in each) for each in action[7:]]
        slots[k][p] = Action(*action[:6], part if action.value == old else action.value, *changed)
    elif how == "write":
        slots[k][p] = action._replace(writes=action.writes[1:] if action.writes else action.reads)


@given(schedule=schedules(workers=3, accumulate=2), data=st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_what_the_check_lets_through_computes_its_rule(schedule, data):
    slots = lists(written(schedule, 3))
    mutated(data.draw, schedule, slots)
    try:
        ordered = checked(schedule, slots_of(slots), 3)
    except ScheduleError:
        return
    prove(schedule, slots_of(slots), 3)
    prove(schedule, ordered, 3)


@given(schedule=schedules(workers=3, accumulate=2), first=st.integers(0, 3))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_uncorrupted_program_passes_and_its_order_suits_one_process(schedule, first):
    slots = written(schedule, 3, first)
    ordered = checked(schedule, slots, 3, first)
    prove(schedule, ordered, 3, first)
    assert [sorted(slot.actions) for slot in ordered] == [sorted(slot.actions) for slot in slots]
    there = {(rank, v) for rank, values in schedule.held_after(first).items() for v in values}
    for slot in ordered:  # one process: a message is there when both of its ends have been passed
        waiting = set()
        for action in slot.actions:
            assert all((action.rank, v) in there or (action.rank, v) in waiting for v in action.reads), action
            (waiting if action.op is Op.COLLECTIVE else there).update((action.rank, v) for v in action.writes)
        there |= waiting


def test_of_every_kind_a_program_computes_its_rule():
    for schedule in kinds():
        slots = written(schedule, 3)
        prove(schedule, checked(schedule, slots, 3), 3)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("mode", CYCLIC)
def test_so_do_programs_whose_ranks_take_turns(mode, n, k):
    schedule = Schedule.build(mode, n, placement="model_parallel", accumulate=k)
    prove(schedule, checked(schedule, written(schedule, 4, 1), 4, 1), 4, 1)


# ------------------------------------------------------------------------------------------- one device


@given(any_mode, st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_dropped_action_is_caught(mode, data):
    schedule, slots = program(mode)
    k, p = data.draw(st.sampled_from(places(slots)))
    del slots[k][p]
    refused_and_wrong(schedule, slots)


@given(any_mode, st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_repeated_action_is_caught(mode, data):
    schedule, slots = program(mode)
    k, p = data.draw(st.sampled_from(places(slots)))
    slots[k].insert(p + 1, slots[k][p])
    refused_and_wrong(schedule, slots)


@given(any_mode, st.data(), st.sampled_from((-1, 1, 2)))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_wrong_version_of_a_forward_backward_or_update_is_caught(mode, data, change):
    schedule, slots = program(mode)
    k, p = data.draw(st.sampled_from(places(slots)))
    slots[k][p] = slots[k][p]._replace(version=slots[k][p].version + change)
    refused_and_wrong(schedule, slots)


def frees(slots):
    """Where versions of parameters are freed."""
    return places(slots, lambda action: any(v.kind == "p" for v in action.frees))


@everywhere
@pytest.mark.parametrize("change", [-1, 1])
def test_freeing_the_wrong_version_is_caught(mode, change):
    schedule, slots = program(mode)
    for k, p in frees(slots):
        action, broken = slots[k][p], [list(actions) for actions in slots]
        freed = tuple(v._replace(number=v.number + change) if v.kind == "p" else v for v in action.frees)
        broken[k][p] = action._replace(frees=freed)
        refused_and_wrong(schedule, broken)


def test_what_is_alive_after_the_drain_is_what_the_next_step_reads():
    schedule, slots = program("dp", n=1, steps=2)
    last = slots[-1][-1]
    assert str(last) == "U0@v2: p0@v1! g0[1:2]! -> p0@v2"
    slots[-1][-1] = last._replace(frees=last.frees[1:])
    assert "U0@v2: 2 versions are kept; the rule needs 1" in refused_and_wrong(schedule, slots, 2)
    slots[-1][-1] = last
    slots[-1][0] = slots[-1][0]._replace(frees=slots[-1][0].frees[1:])
    assert "ends with s0.m1, which nothing has read for the last time" in refused_and_wrong(schedule, slots, 2)


@everywhere
def test_a_version_kept_longer_than_its_last_reader_is_caught(mode):
    """Memory is part of what is promised: at most max d + 1 versions are alive from one slot to the next."""
    schedule, slots = program(mode)
    for k, p in frees(slots)[:3]:
        broken = [list(actions) for actions in slots]
        broken[k][p] = broken[k][p]._replace(frees=tuple(v for v in broken[k][p].frees if v.kind != "p"))
        message = refused_and_wrong(schedule, broken)
        stage = slots[k][p].stage
        assert f"{max(row[stage] for row in schedule.rule.matrix) + 2} versions are kept" in message


@given(any_mode, st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_two_swapped_actions_of_a_micro_batch_are_caught(mode, data):
    schedule, slots = program(mode)
    k, p = data.draw(st.sampled_from(places(slots, lambda a: a.op.is_compute)))
    mine = slots[k][p]
    same = places(slots, lambda a: a.micro_batch == mine.micro_batch and a is not mine)
    k2, p2 = data.draw(st.sampled_from(same))
    slots[k][p], slots[k2][p2] = slots[k2][p2], slots[k][p]
    refused_and_wrong(schedule, slots)


@given(any_mode, st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_swapped_stages_of_two_workers_are_caught(mode, data):
    """Two computes of different micro-batches trade places, in different slots and neither at its end."""
    schedule, slots = program(mode)
    inner = places(slots, lambda a: a.op.is_compute and a.stage > 0)
    k, p = data.draw(st.sampled_from(inner))
    others = [(a, b) for a, b in inner if a != k and slots[a][b].micro_batch != slots[k][p].micro_batch]
    k2, p2 = data.draw(st.sampled_from(others))
    slots[k][p], slots[k2][p2] = slots[k2][p2], slots[k][p]
    refused(schedule, slots)


@given(any_mode, st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_program_that_stops_early_is_caught(mode, data):
    schedule, slots = program(mode)
    kept = data.draw(st.integers(1, len(slots) - 1))
    if mode == "dp" and kept % 6 == 0:
        checked(
            schedule, slots_of(slots[:kept]), kept // 6
        )  # DP drains every step: a shorter program, not a broken one
    refused_and_wrong(schedule, slots[:kept])


@everywhere
def test_a_version_freed_before_its_last_reader_is_caught(mode):
    schedule, slots = program(mode)
    for k, p in frees(slots):
        (freed,) = (v for v in slots[k][p].frees if v.kind == "p")
        readers = places(slots, lambda a: freed in a.reads)  # noqa: B023
        assert readers[-1] == (k, p)
        for k2, p2 in readers[:-1]:
            broken = [list(actions) for actions in slots]
            broken[k2][p2] = broken[k2][p2]._replace(frees=(*broken[k2][p2].frees, freed))
            assert f"{freed} is not on rank 0" in refused_and_wrong(schedule, broken)


@everywhere
def test_an_update_before_the_backward_of_the_last_worker_is_caught(mode):
    schedule, slots = program(mode)
    k, p = find(slots, "U1@v2")
    slots[k].insert(0, slots[k].pop(p))
    said = refused_and_wrong(schedule, slots)
    assert re.match(r"slot \d+, U1@v2: g1\[3:6\] is not on rank 0", said)
    assert mode == "dp" or "; there are g1[3:5]" in said


@everywhere
def test_a_second_update_is_caught(mode):
    schedule, slots = program(mode)
    k, p = find(slots, "U2@v2")
    slots[k + 1].append(slots[k][p])
    refused_and_wrong(schedule, slots)


@pytest.mark.parametrize("first", [0, 1])
def test_an_update_that_is_made_again_once_its_version_is_gone_is_caught(first):
    """All values are right then, but the optimizer, with its momentum, has made the step twice."""
    schedule = Schedule.build("cdp_v2", 2)
    slots = lists(written(schedule, STEPS, first))
    made = first + 1
    k, p = find(slots, f"U0@v{made}")
    again = slots[k][p]
    total = next(v for v in again.reads if v.kind == "g")
    slots[k][p] = again._replace(frees=tuple(v for v in again.frees if v != total))
    newer = Value("p", 0, made)
    k2, p2 = places(slots, lambda a: newer in a.reads)[0]
    slots[k2][p2] = slots[k2][p2]._replace(frees=(*slots[k2][p2].frees, newer))
    slots[k2].append(again)
    with pytest.raises(Wrong, match="the optimizer's step for the second time"):
        prove(schedule, slots_of(slots), STEPS, first)
    with pytest.raises(ScheduleError, match=rf"slot {k2}, U0@v{made}: the rank has made this version before"):
        checked(schedule, slots_of(slots), STEPS, first)


def test_work_of_the_steps_before_the_run_is_not_done_again():
    schedule = Schedule.build("cdp_v1", 2)
    forward, update = "F0.m1@v0: p0@v0 b0.w1! -> s0.m1 x1.m1 b0.w1", "U0@v1: p0@v0! g0[0:2]! -> p0@v1"
    again, anew = (Checker(schedule, 1, slots_of([[Action.parse(text)]])) for text in (forward, update))
    with pytest.raises(ScheduleError, match=r"b0\.w1 has micro-batch 1 already"):
        again.follow(1)
    anew._live[0][Value("g", 0, 0, 0, 2)] = -1
    with pytest.raises(ScheduleError, match="the rank has made this version before"):
        anew.follow(1)


@everywhere
def test_backward_before_forward_is_caught(mode):
    schedule, slots = program(mode)
    (k, p), (k2, p2) = (
        places(slots, lambda a: (a.op, a.stage, a.micro_batch) == (op, 2, 4))[0]  # noqa: B023
        for op in (Op.FORWARD, Op.BACKWARD)
    )
    slots[k][p], slots[k2][p2] = slots[k2][p2], slots[k][p]
    assert "s2.m4 is not on rank 0" in refused_and_wrong(schedule, slots)


class Quick(Straight):
    """One micro-batch a step, and the next step begins two slots later."""

    name = "quick"
    period = 2

    def begin(self, i):
        return 2 * i


def quick(staleness):
    sizes = Sizes(stages=3, workers=1)
    timeline, rule = Quick(sizes), Matrix(sizes, [[staleness] * 3])
    return Schedule(Spec("dp", workers=1, stages=3), timeline, rule, SingleDevice(timeline), ())


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_staleness_that_an_error_advises_works_on_any_timeline(staleness):
    """The update of stage 0 in step t is in slot 2t + 5, and step t reads in slot 2t."""
    with pytest.raises(ScheduleError) as refusal:
        Program(quick(staleness))
    shown, first = str(refusal.value), staleness + 1
    assert f"asks for that version in slot {2 * first}, but its last gradient is there only after slot 5" in shown
    assert shown.splitlines()[1].endswith("Staleness 2 works at this place"), "cdp_v2 is for another timeline"
    assert re.search(r"^slot .* 6$", shown, re.MULTILINE), "the drawing goes on to the slot that the text names"
    Program(quick(2))


def test_running_statistics_that_take_micro_batches_out_of_order_are_caught():
    schedule, slots = program("gpipe", n=1, steps=2, accumulate=2)  # one worker: both micro-batches have its statistics
    assert [action.label for slot in slots[4:6] for action in slot] == ["F0.m2@v1", "F0.m3@v1"]
    slots[4], slots[5] = slots[5], slots[4]
    shown = refused_and_wrong(schedule, slots, steps=2)
    assert "slot 5, F0.m2@v1: b0.w0 has micro-batch 3 already" in shown


@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2", STALE])
@pytest.mark.parametrize("shift", [-2, 2])
def test_two_users_of_a_stage_in_a_slot_are_caught(mode, shift):
    schedule, slots = program(mode)
    moved = {}
    for number, actions in enumerate(slots):
        for action in [a for a in actions if a.micro_batch == 7]:
            actions.remove(action)
            moved[number + shift] = action
    for number, actions in enumerate(slots):
        if number in moved:
            actions.insert(0 if shift > 0 else len(actions), moved.pop(number))
    assert not moved
    assert re.search(r"stage \d would compute two things in one slot", refused(schedule, slots))


@everywhere
def test_two_computes_of_a_micro_batch_in_a_slot_are_caught(mode):
    schedule, slots = program(mode)
    k, _ = places(slots, lambda a: (a.op, a.stage, a.micro_batch) == (Op.FORWARD, 1, 1))[0]
    (action,) = [a for a in slots[k + 1] if a.micro_batch == 1]
    slots[k + 1].remove(action)
    slots[k].append(action)
    assert re.search(
        r"F2.m1@v0: micro-batch 1 would compute two things in one slot: it has F1.m1@v0", refused(schedule, slots)
    )


def test_a_version_made_in_the_same_slot_may_not_be_read():
    """Slots order actions, the actions inside one do not: an update counts from the next slot on."""
    schedule, slots = program("dp", n=1, steps=2)  # F0@v0 | B0@v0 U0@v1 | F0@v1 | ...
    assert [action.label for action in slots[1]] == ["B0.m0@v0", "U0@v1"]
    slots[1].append(slots[2].pop())
    assert "slot 1, F0.m1@v1: version 1 of stage 0 is made only in this same slot" in refused(schedule, slots, 2)


@everywhere
def test_foreign_actions_are_caught(mode):
    schedule, slots = program(mode)
    for text in (
        "F7.m4@v1: x7.m4 p7@v1 b7.w1 -> s7.m4 x8.m4 b7.w1", "B7.m4@v1: s7.m4 d7.m4 p7@v1 -> d6.m4 g7[4:5]",
        "U7@v1: p7@v0 g7[0:3] -> p7@v1", "F0.m4@v9: p0@v9 b0.w1 -> s0.m4 x1.m4 b0.w1",
    ):  # fmt: skip
        broken = [list(actions) for actions in slots]
        broken[8].append(Action.parse(text))
        refused_and_wrong(schedule, broken)


def test_no_update_makes_the_version_that_is_there_from_the_start():
    schedule, slots = program("dp", n=1)
    slots[1].append(Action.parse("U0@v0: p0@v0 g0[0:1] -> p0@v0"))
    assert "U0@v0: an update makes version 1 or a later one" in refused_and_wrong(schedule, slots)


@everywhere
def test_slots_out_of_order_are_caught(mode):
    schedule, slots = program(mode)
    slots[9], slots[10] = slots[10], slots[9]
    refused_and_wrong(schedule, slots)


def test_a_step_left_out_is_caught():
    schedule = Schedule.build([[2]], 1)
    slots = [*written(schedule, 1, 0), *(Slot(s.number + 2, s.actions) for s in written(schedule, 1, 2))]
    with pytest.raises(ScheduleError, match=r"U0@v3: p0@v2 is not on rank 0"):
        checked(schedule, slots, 2)


def test_the_check_goes_slot_by_slot_and_ends_at_the_first_fault():
    schedule, slots = program("cdp_v1", n=2)
    k, p = places(slots, lambda a: a.op is Op.FORWARD and a.micro_batch > 2)[0]
    slots[k][p] = slots[k][p]._replace(version=5)
    checker = Checker(schedule, 0, slots_of(slots))
    checker.follow(k)
    assert [slot.number for piece in checker.pieces for slot in piece] == [*range(k)]
    with pytest.raises(ScheduleError, match=f"slot {k}, F0.m3@v5: its rule asks for version 0"):
        checker.follow(k + 1)


# ------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("k", [1, 2])
def test_a_lost_gradient_is_named(k):
    schedule, slots = program("cdp_v2", "replicated", accumulate=k)
    at, p = places(slots, lambda a: a.op is Op.ADD)[0]
    lost = slots[at].pop(p)
    assert re.search(
        rf"slot \d+, rank {lost.rank}, .*{re.escape(str(lost.value))} is not on rank",
        refused_and_wrong(schedule, slots),
    )


def test_a_sum_that_is_not_added_from_the_left_is_refused():
    """(a + b) + c and a + (b + c) differ in their last bits, so that one device and three would."""
    schedule, slots = program("cdp_v2", n=3, steps=2)
    k, p = places(slots, lambda a: (a.op, a.stage, a.micro_batch) == (Op.BACKWARD, 0, 1))[0]
    alone, both, whole = Value("g", 0, 1, 0, 2), Value("g", 0, 1, 0, 3), Value("g", 0, 0, 0, 3)
    first = Value("g", 0, 0, 0, 1)
    slots[k][p] = slots[k][p]._replace(
        reads=tuple(v for v in slots[k][p].reads if v.kind != "g"), writes=(alone,),
        frees=tuple(v for v in slots[k][p].frees if v.kind != "g"),
    )  # fmt: skip
    k, p = places(slots, lambda a: (a.op, a.stage, a.micro_batch) == (Op.BACKWARD, 0, 2))[0]
    change = {Value("g", 0, 0, 0, 2): alone, whole: both}
    slots[k][p] = Action(*slots[k][p][:7], *(tuple(change.get(v, v) for v in each) for each in slots[k][p][7:]))
    slots[k].insert(p + 1, Action(Op.ADD, 0, 0, value=whole, reads=(first, both), writes=(whole,), frees=(first, both)))
    assert (
        "A g0[0:3]: it must read g0[0:2], g0[2:3], not g0[0:1], g0[1:3]: a sum is of micro-batches"
        in refused_and_wrong(schedule, slots, 2)
    )


def test_gradients_out_of_order_are_caught():
    schedule, slots = program("cdp_v2", "zero")
    ((a, i), (b, j), *_) = places(slots, lambda x: x.op is Op.ADD and x.stage == 0)
    slots[a][i], slots[b][j] = slots[b][j], slots[a][i]
    refused_and_wrong(schedule, slots)


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
def test_sending_to_the_other_of_two_holders_what_has_been_added_to_already_is_caught(mode):
    schedule, slots = program(mode, "replicated", n=2)
    add_slot, add = places(slots, lambda x: x.op is Op.ADD and (x.rank, x.stage) == (1, 1))[0]
    slot, place = places(slots, lambda x: x.op is Op.SEND and (x.stage, x.rank) == (1, 1))[0]
    early = slots[add_slot].pop(add)
    slots[slot].insert(place, early)
    assert "S g1[1:2]>0: g1[1:2] is not on rank 1" in refused_and_wrong(schedule, slots)


# ------------------------------------------------------------------------------------------- messages


@given(placement=st.sampled_from(DISTRIBUTED), mode=st.sampled_from(["dp", *CYCLIC]),
       op=st.sampled_from([Op.SEND, Op.RECEIVE, Op.ADD]), n=st.sampled_from([2, 3]), data=st.data())  # fmt: skip
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_missing_action_is_caught(placement, mode, op, n, data):
    schedule, slots = program(mode, placement, n)
    found = places(slots, lambda a: a.op is op)
    assume(found)
    k, p = data.draw(st.sampled_from(found))
    del slots[k][p]
    refused_and_wrong(schedule, slots)


@given(placement=st.sampled_from(DISTRIBUTED), mode=st.sampled_from(["dp", *CYCLIC]),
       n_and_shift=st.sampled_from([(2, 1), (3, 1), (3, 2)]), data=st.data())  # fmt: skip
@settings(max_examples=50, deadline=None, derandomize=True)
def test_an_action_on_another_rank_is_caught(placement, mode, n_and_shift, data):
    n, shift = n_and_shift
    schedule, slots = program(mode, placement, n)
    k, p = data.draw(st.sampled_from(places(slots)))
    slots[k][p] = slots[k][p]._replace(rank=(slots[k][p].rank + shift) % schedule.ranks)
    refused(schedule, slots)


@given(placement=st.sampled_from(DISTRIBUTED), mode=st.sampled_from(["dp", *CYCLIC]), n=st.sampled_from([2, 3]),
       op=st.sampled_from([Op.SEND, Op.RECEIVE]), data=st.data())  # fmt: skip
@settings(max_examples=50, deadline=None, derandomize=True)
def test_messages_between_two_ranks_in_another_order_at_one_end_are_caught(placement, mode, n, op, data):
    schedule, slots = program(mode, placement, n)
    found = places(slots, lambda a: a.op is op)
    a, i = data.draw(st.sampled_from(found))
    first = slots[a][i]
    later = [
        (b, j) for b, j in found
        if (b, j) > (a, i) and (slots[b][j].rank, slots[b][j].peer) == (first.rank, first.peer)
    ]  # fmt: skip
    assume(later)
    b, j = later[0]
    slots[a][i], slots[b][j] = slots[b][j], slots[a][i]
    refused_and_wrong(schedule, slots)


@pytest.mark.parametrize("placement", DISTRIBUTED)
def test_a_receive_may_be_early_by_a_training_step_but_nothing_may_wait_for_it_before_its_send(placement):
    schedule, slots = program("cdp_v2", placement)
    k, p = places(slots, lambda a: a.op is Op.RECEIVE)[0]
    assert k <= schedule.slots_per_step
    slots[0].insert(0, slots[k].pop(p))
    checked(schedule, slots_of(slots), STEPS)
    prove(schedule, slots_of(slots), STEPS)
    k, p = places(slots, lambda a: a.op is Op.SEND)[0]
    slots[-1].append(slots[k].pop(p))
    refused(schedule, slots)


@pytest.mark.parametrize("ahead", [4, 5])
def test_a_receive_may_stand_a_training_step_before_its_send_and_no_more(ahead):
    schedule, slots = program("cdp_v2", "pipeline", n=2)
    assert schedule.slots_per_step == 4
    early = [[a for a in actions if (a.op, a.rank) != (Op.RECEIVE, 0)] for actions in slots]
    for number, actions in enumerate(slots):  # all that rank 0 receives moves together, so that the order stays
        early[max(0, number - ahead)] += [a for a in actions if (a.op, a.rank) == (Op.RECEIVE, 0)]
    prove(schedule, slots_of(early), STEPS)  # gloo would run both
    if ahead == 4:
        checked(schedule, slots_of(early), STEPS)
        return
    said = refused(schedule, early)
    assert re.match(r"slot (\d+), rank 1, S d0.m\d>0: its receive stands 5 slots before it, in slot \d+: ", said)
    assert "at most a training step, 4 slots, is allowed" in said


def test_a_receive_may_not_stand_so_late_that_its_sender_waits_for_it():
    """All sums are received and added right before what needs them: symbolically right, but the ranks would hang."""
    schedule, slots = program("cdp_v1", "replicated", n=2)
    late, put_off = [], defaultdict(list)
    for actions in slots:
        late.append([])
        for action in actions:
            mine = put_off[action.rank]
            if action.op is Op.ADD or (action.op is Op.RECEIVE and action.value.kind == "g"):
                mine.append(action)
                continue
            needed = max((place + 1 for place, other in enumerate(mine) if other.writes[0] in action.reads), default=0)
            late[-1] += [*mine[:needed], action]
            del mine[:needed]
    late = add_frees(late, schedule.held_after(STEPS))
    prove(schedule, slots_of(late), STEPS)
    said = refused(schedule, late)
    assert re.search(r"R g\d\S+: its send stands [5-9] slots before it, in slot \d+: at most 4 slots, twice the", said)


def test_a_message_that_nobody_needs_is_caught():
    schedule, slots = program("cdp_v2", "pipeline")
    k, p = places(slots, lambda a: a.op is Op.SEND)[-1]
    action = slots[k][p]
    slots[k][p] = action._replace(frees=())
    assert "which nothing has read for the last time" in refused_and_wrong(schedule, slots)
    slots[k][p] = action
    slots[-1] += [Action.parse("S b0.w0>1: b0.w0 ->", 0), Action.parse("R b0.w0<0: -> b0.w0", 1)]
    assert "b0.w0, which nothing has read for the last time, on rank 1" in refused_and_wrong(schedule, slots)


@pytest.mark.parametrize("op", [Op.SEND, Op.RECEIVE])
def test_a_message_with_one_end_is_named(op):
    schedule, slots = program("dp", "pipeline", 2)
    slots[-1].append(next(end for end in send(Value("b", 0, 0), 0, 1) if end.op is op))
    assert re.search(
        r"ends with messages of one end only: rank [01]: [SR] b0.w0[<>][01]", refused_and_wrong(schedule, slots)
    )


def test_ranks_that_wait_for_each_other_in_a_cycle_are_refused():
    """Two ranks exchange gradients: each now sends its own only when it has added the other's."""
    schedule, slots = program("dp", "replicated", 1, replicas=2)
    for rank in range(2):
        k, p = places(slots, lambda a: a.op is Op.SEND and a.rank == rank)[0]  # noqa: B023
        end = slots[k].pop(p)
        k, p = places(slots, lambda a: a.op is Op.ADD and a.rank == rank)[0]  # noqa: B023
        add = slots[k][p]
        slots[k][p] = add._replace(frees=tuple(v for v in add.frees if v != end.value))
        slots[k].insert(p + 1, end._replace(frees=(end.value,)))
    said = refused_and_wrong(schedule, slots)
    assert re.match(
        r"slot \d, rank 0, A g0\[0:2\]: it waits for g0\[1:2\], and ranks wait for each other in a cycle", said
    )


def test_what_is_sent_only_later_is_named_with_its_slot():
    schedule, slots = program("cdp_v2", "pipeline", 2)
    k, p = places(slots, lambda a: a.op is Op.SEND)[0]
    end = slots[k].pop(p)
    slots[k + 3].append(end)
    message = refused(schedule, slots)
    assert f"it waits for {end.value}, which is sent only in slot {k + 3}" in message
    assert message.startswith(f"slot {k + 1}, rank 1, F1.m0@v0: ")


def test_a_value_that_nothing_makes_is_named():
    schedule, slots = program("cdp_v2", "pipeline", 2)
    k, p = places(slots, lambda a: a.op is Op.SEND)[0]
    for place in (p, next(i for i, a in enumerate(slots[k]) if a.op is Op.RECEIVE and a.value == slots[k][p].value)):
        slots[k][place] = None
    slots[k] = [action for action in slots[k] if action is not None]
    message = refused_and_wrong(schedule, slots)
    assert message.startswith(f"slot {k + 1}, rank 1, F1.m0@v0: x1.m0 is not on rank 1")


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_would_compute_two_things_in_a_slot_is_refused(n):
    schedule, slots = program("cdp_v1", "pipeline", n)
    k, p = places(slots, lambda a: a.op is Op.BACKWARD and a.stage == 0)[0]
    action = slots[k].pop(p)
    target = next(number for number in range(k + 1, len(slots)) if any(
        a.op.is_compute and a.rank == action.rank and a.micro_batch != action.micro_batch for a in slots[number]
    ))  # fmt: skip
    slots[target].append(action)
    first = next(a for a in slots[target] if a.op.is_compute and a.rank == action.rank)
    said = f"rank {action.rank} would compute two things in one slot: it has {first.label}"
    assert said in refused(schedule, slots)


def test_one_rank_with_two_stages_that_meet_is_refused():
    """A placement that is not ours puts stages 0 and 2 of the cyclic timeline on one rank: they meet in a slot."""
    from test_schedule_placements import Paired

    one = Schedule.build("cdp_v1", 3, placement="pipeline")
    schedule = Schedule(one.spec, one.timeline, one.rule, Paired(one.timeline))
    with pytest.raises(
        ScheduleError, match=r"slot \d+, rank 0, [FB]\d.m\d@v0: rank 0 would compute two things in one slot"
    ):
        Program(schedule)


@pytest.mark.parametrize("label", ["fault", "rank"])
def test_ranks_that_do_not_exist_are_refused(label):
    schedule, slots = program("cdp_v2", "pipeline", 2)
    k, p = places(slots, lambda a: a.op is Op.SEND)[0]
    slots[k][p] = slots[k][p]._replace(**{"peer": 2} if label == "fault" else {"rank": 7})
    assert "has only ranks 0 to 1" in refused(schedule, slots)


# ------------------------------------------------------------------------------------------- collectives


def collective(placement, change, n=3):
    """The message of the refusal of a program of collectives in which `change` has been applied to its slots."""
    schedule, slots = program("dp", placement, n, collectives=True)
    change(slots)
    return refused(schedule, slots)


@given(data=st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_dropped_repeated_or_moved_part_of_a_collective_is_caught(data):
    placement = data.draw(st.sampled_from(COLLECTIVE_PLACEMENTS))
    how = data.draw(st.sampled_from(["drop", "repeat", "rank", "next slot", "swap ranks"]))

    def change(slots):
        k, p = data.draw(st.sampled_from(places(slots[:-6], lambda a: a.op == "C")))
        action = slots[k].pop(p)
        if how == "repeat":
            slots[k][p:p] = [action, action]
        elif how == "rank":
            slots[k].insert(p, action._replace(rank=(action.rank + 1) % 3))
        elif how == "next slot":
            slots[k + 1].append(action)
        elif how == "swap ranks":
            other = next(a for a in slots[k] if (a.op, a.stage) == ("C", action.stage) and a.rank != action.rank)
            slots[k][slots[k].index(other)] = other._replace(rank=action.rank)
            slots[k].insert(p, action._replace(rank=other.rank))

    collective(placement, change)


def test_ranks_that_would_wait_for_each_other_in_collectives_are_refused():
    """A rank takes part in the all-gather only after the reduce-scatter that others take part in after it."""

    def change(slots):
        k, p = places(slots, lambda a: a.op == "C" and a.rank == 1 and a.value == Value("pb", 1, 1))[0]
        gather = slots[k].pop(p)
        assert any(a.op == "C" and a.value.kind == "g" for a in slots[k])
        slots[k].append(gather)

    said = collective("zero", change)
    assert re.match(r"slot 3, rank \d, .*: it waits for .*, and ranks wait for each other in a cycle", said)


def test_nobody_reads_gathered_parameters_before_all_take_part():
    schedule, slots = program("dp", "zero", 2, collectives=True)
    k, p = places(slots, lambda a: a.op == "C" and a.rank == 1)[0]
    part = slots[k].pop(p)
    slots[k].append(part)  # rank 1 takes part after its forward, and in another all-gather before
    refused_and_wrong(schedule, slots)
    slots[k].pop()
    slots[k].insert(next(i for i, a in enumerate(slots[k]) if a.op == "F" and a.rank == 1) + 1, part)
    said = refused_and_wrong(schedule, slots)
    assert re.match(
        r"slot 0, rank \d, .*: it waits for .*cycle, or nothing sends it|slot 0, rank 1, F0.m1@v0: pf0.m1", said
    )


def test_nobody_gathers_what_has_not_been_made():
    def change(slots):
        early = [a for a in slots[5] if a.op == "C" and a.value.version == 1]
        slots[5] = [*early, *(a for a in slots[5] if a not in early)]

    assert "C pf0.m3@v1: p0@v1#1/3 is not on rank 0; there are p0@v0#1/3" in collective("zero", change)


def test_a_rank_that_takes_no_part_is_named():
    def change(slots):
        k, p = places(slots, lambda a: a.op == "C" and a.rank == 2 and a.value.kind == "g")[0]
        del slots[k][p]

    assert re.search(r"slot 3, rank 0, C g2\[0:3\]: ranks \[2\] do not take part", collective("replicated", change))


@pytest.mark.parametrize("placement", COLLECTIVE_PLACEMENTS)
def test_a_collective_of_gradients_of_other_micro_batches_is_refused(placement):
    schedule, slots = program("dp", placement, 2, collectives=True, accumulate=2)
    k, p = places(slots, lambda a: a.op == "C" and a.value.kind == "g")[0]
    part = slots[k][p]
    (own,) = part.reads
    slots[k][p] = part._replace(value=part.value._replace(stop=part.value.stop + 1),
                                writes=(part.value._replace(stop=part.value.stop + 1),))  # fmt: skip
    refused(schedule, slots)
    slots[k][p] = part._replace(reads=(own._replace(number=own.number + 1),))
    refused_and_wrong(schedule, slots)


# ------------------------------------------------------------------------------------------- parts


@given(data=st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_parts_that_are_dropped_repeated_or_swapped_are_caught(data):
    schedule = Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET)
    slots = lists(written(schedule, STEPS))
    k, p = data.draw(st.sampled_from(places(slots, lambda a: any(v.parts > 1 for v in (*a.reads, a.value) if v))))
    action = slots[k][p]
    how = data.draw(st.sampled_from(["drop", "repeat", "other part"]))
    if how == "other part" and action.op.is_message:
        value = action.value._replace(part=action.value.part % action.value.parts + 1)
        slots[k][p] = action._replace(value=value, writes=(value,) if action.op is Op.RECEIVE else ())
    elif how == "repeat":
        slots[k].insert(p, action)
    else:
        del slots[k][p]
    refused_and_wrong(schedule, slots)
