"""Every way to corrupt a valid program is caught, and the error shows the grid."""

from __future__ import annotations

import itertools
import re

import pytest
from cdp_repro.schedule.placement import SingleDevice
from cdp_repro.schedule.validation import validated
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import Action, Op, Schedule, ScheduleError, Slot

STALE = [[3, 1, 1], [1, 2, 1], [2, 0, 1]]
MODES = ("dp", "cdp_v1", "cdp_v2", STALE)
STEPS = 5


def program(mode, n=3, s=3, steps=STEPS, start=0, order="paper"):
    schedule = Schedule.build(mode, n, s, slot_order=order)
    return schedule.mode, [[slot.number, list(slot.actions)] for slot in schedule.slots(range(start, start + steps))]


def check(mode, slots):
    return list(validated([Slot(number, tuple(actions)) for number, actions in slots], SingleDevice(mode)))


def refused(mode, slots):
    with pytest.raises(ScheduleError) as refusal:
        check(mode, slots)
    message = str(refusal.value)
    assert re.search(r"^slot +\d", message, re.MULTILINE), message
    assert all(re.search(rf"^worker {worker}\b", message, re.MULTILINE) for worker in range(len(mode.staleness)))
    return message


def find(slots, text):
    action = Action.parse(text)
    ((slot, place),) = [(k, actions.index(action)) for k, (_, actions) in enumerate(slots) if action in actions]
    return slot, place


def remove(slots, text):
    slot, place = find(slots, text)
    return slot, slots[slot][1].pop(place)


everywhere = pytest.mark.parametrize("mode", MODES, ids=["dp", "cdp_v1", "cdp_v2", "matrix"])
any_mode = st.sampled_from(MODES)
places = st.integers(0, 10**6)


def pick(slots, place, ops="FBUX"):
    all_places = [(k, p) for k, (_, actions) in enumerate(slots) for p, a in enumerate(actions) if a.op in ops]
    return all_places[place % len(all_places)]


@everywhere
def test_the_uncorrupted_program_passes_unchanged(mode):
    for order, start in itertools.product(("paper", "backward_first"), (0, 1, 7)):
        mode_, slots = program(mode, order=order, start=start)
        assert [[slot.number, list(slot.actions)] for slot in check(mode_, slots)] == slots


@given(any_mode, places)
@settings(deadline=None, max_examples=50)
def test_any_dropped_action_is_caught(mode, place):
    mode, slots = program(mode)
    k, p = pick(slots, place)
    del slots[k][1][p]
    refused(mode, slots)


@given(any_mode, places)
@settings(deadline=None, max_examples=50)
def test_any_repeated_action_is_caught(mode, place):
    mode, slots = program(mode)
    k, p = pick(slots, place)
    slots[k][1].insert(p + 1, slots[k][1][p])
    refused(mode, slots)


@given(any_mode, places, st.sampled_from((-1, 1, 2)))
@settings(deadline=None, max_examples=50)
def test_any_wrong_version_of_a_forward_backward_or_update_is_caught(mode, place, change):
    mode, slots = program(mode)
    k, p = pick(slots, place, "FBU")
    action = slots[k][1][p]
    slots[k][1][p] = action.at_version(action.version + change)
    refused(mode, slots)


def frees(slots):
    return [(k, p) for k, (_, actions) in enumerate(slots) for p, a in enumerate(actions) if a.op is Op.FREE]


@everywhere
@pytest.mark.parametrize("change", [-1, 1])
def test_freeing_the_wrong_version_is_caught(mode, change):
    mode, slots = program(mode)
    for k, p in frees(slots)[:-3]:
        action = slots[k][1][p]
        if action.version + change >= 0:
            broken = [[number, list(actions)] for number, actions in slots]
            broken[k][1][p] = action.at_version(action.version + change)
            refused(mode, broken)


def test_what_is_alive_after_the_drain_is_what_the_next_step_reads():
    mode, slots = program("dp", 1, 1, steps=2)
    assert str(slots[-1][1].pop()) == "X0@v1"
    slots[-1][1].append(Action.parse("X0@v2"))  # frees the newest version, keeps the stale one
    refused(mode, slots)


@everywhere
def test_a_version_kept_longer_than_its_last_reader_is_caught(mode):
    """Memory is part of what is promised: at most max d + 1 versions are alive from one slot to the next."""
    mode, slots = program(mode)
    for k, p in frees(slots)[:3]:
        broken = [[number, list(actions)] for number, actions in slots]
        broken[k + 8][1].append(broken[k][1].pop(p))
        refused(mode, broken)


@given(any_mode, places, places)
@settings(deadline=None, max_examples=50)
def test_two_swapped_actions_of_a_micro_batch_are_caught(mode, place, other):
    mode, slots = program(mode)
    k, p = pick(slots, place, "FB")
    same = [
        (k2, p2)
        for k2, (_, actions) in enumerate(slots)
        for p2, a in enumerate(actions)
        if a.micro_batch == slots[k][1][p].micro_batch and (k2, p2) != (k, p)
    ]
    k2, p2 = same[other % len(same)]
    slots[k][1][p], slots[k2][1][p2] = slots[k2][1][p2], slots[k][1][p]
    refused(mode, slots)


@given(any_mode, places, st.booleans())
@settings(deadline=None, max_examples=50)
def test_swapped_stages_of_two_workers_are_caught(mode, place, later):
    """Two computes of different micro-batches trade places, in different slots and neither at its end."""
    mode, slots = program(mode)
    k, p = pick(slots, place, "FB")
    mine = slots[k][1][p]
    others = [
        (k2, p2)
        for k2, (_, actions) in enumerate(slots)
        for p2, a in enumerate(actions)
        if (k2 > k) is later and k2 != k and a.op.is_compute and a.micro_batch != mine.micro_batch and a.stage > 0
    ]
    if not others or mine.stage == 0:
        return
    k2, p2 = others[place % len(others)]
    slots[k][1][p], slots[k2][1][p2] = slots[k2][1][p2], slots[k][1][p]
    refused(mode, slots)


@given(any_mode, st.integers(1, 10**6))
@settings(deadline=None, max_examples=50)
def test_a_program_that_stops_early_is_caught(mode, cut):
    mode, slots = program(mode)
    kept = 1 + cut % (len(slots) - 1)
    if mode.name == "dp" and kept % 6 == 0:
        check(mode, slots[:kept])  # DP drains after every step: a shorter program, not a broken one
    else:
        refused(mode, slots[:kept])


@given(any_mode, places)
@settings(deadline=None, max_examples=50)
def test_a_version_freed_before_its_last_backward_is_caught(mode, place):
    mode, slots = program(mode)
    k, p = pick(slots, place, "X")
    slots[k][1].insert(p - 1, slots[k][1].pop(p))  # it stood right behind its last reader
    refused(mode, slots)


@everywhere
def test_a_version_freed_before_a_later_reader_begins_is_caught(mode):
    mode, slots = program(mode)
    for k, p in frees(slots):
        broken = [[number, list(actions)] for number, actions in slots]
        free = broken[k][1].pop(p)
        readers = [
            (k2, p2)
            for k2, (_, actions) in enumerate(broken)
            for p2, a in enumerate(actions)
            if a.op is Op.FORWARD and (a.stage, a.version) == (free.stage, free.version)
        ]
        k2, p2 = readers[-1]
        broken[k2][1].insert(p2, free)
        refused(mode, broken)


@everywhere
def test_an_update_before_the_backward_of_the_last_worker_is_caught(mode):
    mode, slots = program(mode)
    k, action = remove(slots, "U1@v2")
    slots[k][1].insert(0, action)
    assert "workers have completed their backward" in refused(mode, slots)


@everywhere
def test_a_second_update_is_caught(mode):
    mode, slots = program(mode)
    k, p = find(slots, "U2@v2")
    slots[k + 1][1].append(slots[k][1][p])
    refused(mode, slots)


@everywhere
def test_backward_before_forward_is_caught(mode):
    mode, slots = program(mode)
    k, p = next((k, p) for k, (_, acts) in enumerate(slots) for p, a in enumerate(acts) if str(a).startswith("F2.m4"))
    k2, p2 = next((k, p) for k, (_, acts) in enumerate(slots) for p, a in enumerate(acts) if str(a).startswith("B2.m4"))
    slots[k][1][p], slots[k2][1][p2] = slots[k2][1][p2], slots[k][1][p]
    assert "micro-batch 4 is due for F2.m4" in refused(mode, slots)


@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2", STALE])
@pytest.mark.parametrize("shift", [-2, 2])
def test_two_users_of_a_stage_in_a_slot_are_caught(mode, shift):
    mode, slots = program(mode)
    moved = {}
    for number, actions in slots:
        for action in [a for a in actions if a.micro_batch == 7]:
            actions.remove(action)
            moved[number + shift] = action
    for number, actions in slots:
        if number in moved:
            actions.insert(0 if shift > 0 else len(actions), moved.pop(number))
    assert not moved
    assert "in the same slot" in refused(mode, slots)


@everywhere
def test_two_computes_of_a_micro_batch_in_a_slot_are_caught(mode):
    mode, slots = program(mode)
    k = next(k for k, (_, actions) in enumerate(slots) if any(str(a).startswith("F1.m1") for a in actions))
    (action,) = [a for a in slots[k + 1][1] if a.micro_batch == 1]
    slots[k + 1][1].remove(action)
    slots[k][1].append(action)
    refused(mode, slots)


def test_a_worker_with_two_micro_batches_in_a_slot_is_caught():
    """N=1, S=2: the second micro-batch starts in slot 2 instead of 4; no stage has two users."""
    mode, slots = program("cdp_v1", 1, 2, steps=2)
    actions = {action: number for number, actions in slots for action in actions}
    early = {action: number - 2 * (action.micro_batch == 1) for action, number in actions.items() if action.op in "FB"}
    computes = {k: [a for a, number in early.items() if number == k] for k in sorted(set(early.values()))}
    slots = [[k, computes[k]] for k in computes]
    for _k, acts in slots:
        for action in list(acts):
            if action.op is Op.BACKWARD:
                step = action.micro_batch
                at = acts.index(action) + 1
                if step >= 1:
                    acts.insert(at, Action(Op.FREE, action.stage, version=step - 1))
                    at += 1
                acts.insert(at, Action(Op.UPDATE, action.stage, version=step + 1))
    refused(mode, slots)


def test_a_version_made_in_the_same_slot_may_not_be_read():
    """Slots order actions, the actions inside one do not: an update counts from the next slot on."""
    mode, slots = program("dp", 1, 1, steps=2)  # F0@v0 | B0@v0 U0@v1 X0@v0 | F0@v1 | ...
    assert [str(action) for action in slots[1][1]] == ["B0.m0@v0", "U0@v1", "X0@v0"]
    slots[1][1].append(slots[2][1].pop())
    assert "made only in this same slot" in refused(mode, slots)


@everywhere
def test_foreign_actions_are_caught(mode):
    mode, slots = program(mode)
    for text in ("F7.m4@v1", "B7.m4@v1", "U7@v1", "X7@v0", "F0.m4"):
        broken = [[number, list(actions)] for number, actions in slots]
        broken[8][1].append(Action.parse(text))
        refused(mode, broken)


@everywhere
def test_slots_out_of_order_are_caught(mode):
    mode, slots = program(mode)
    slots[9], slots[10] = slots[10], slots[9]
    refused(mode, slots)


def test_a_step_left_out_is_caught():
    schedule = Schedule.build([[2]], 1)
    with pytest.raises(ScheduleError, match=r"U0@v3: needs version 2 alive"):
        list(schedule.slots([0, 2]))


def test_an_endless_program_with_a_fault_is_refused_not_searched_to_its_end():
    schedule = Schedule.build("cdp_v1", 2)
    pulled = []

    def broken():
        for slot in schedule.slots(itertools.count()):
            pulled.append(slot.number)
            assert slot.number < 500, "validation reads on for ever after the fault"
            if slot.number == 9:
                slot = Slot(9, tuple(a.at_version(a.version + 1) if a.op is Op.FORWARD else a for a in slot.actions))
            yield slot

    with pytest.raises(ScheduleError):
        for _ in validated(broken(), schedule.placement):
            pass


def test_validation_is_lazy_and_lets_slots_through_one_by_one():
    mode, slots = program("cdp_v2")
    pulled = []

    def stream():
        for number, actions in slots:
            pulled.append(number)
            yield Slot(number, tuple(actions))

    for slot in validated(stream(), SingleDevice(mode)):
        assert pulled[-1] == slot.number
