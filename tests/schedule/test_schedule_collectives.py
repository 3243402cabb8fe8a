"""Data parallelism by collectives: what each rank does, what is sent, and every way to corrupt it is caught."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from cdp_repro.schedule.validation import validated
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import (
    COLLECTIVE_PLACEMENTS,
    Action,
    Op,
    Schedule,
    ScheduleError,
    Slot,
    StageCosts,
    simulate,
    simulate_totals,
)

STEPS = 4
on_both = pytest.mark.parametrize("placement", COLLECTIVE_PLACEMENTS)


def build(placement, n=2, s=None, **options):
    return Schedule.build("dp", n, s, placement, collectives=True, **options)


def texts(slots, rank):
    return [" ".join(map(str, slot.program_of(rank))) for slot in slots]


def test_an_all_reduce_follows_the_backward_and_the_update_waits_until_it_is_read():
    slots = list(build("replicated").slots(range(2)))
    assert texts(slots, 1)[2:6] == [
        "B1.m1@v0 C1.m1@v1:total",
        "B0.m1@v0 C0.m1@v1:total U0@v1 X0@v0",
        "F0.m3@v1 U1@v1 X1@v0",
        "F1.m3@v1",
    ]


def test_all_gather_a_slot_ahead_and_update_their_shards_when_the_next_slot_has_hidden_the_reduce_scatter():
    slots = list(build("zero").slots(range(2)))
    for rank in range(2):
        assert texts(slots, rank)[2:4] == [
            f"C0.m{rank}@v0:parameters B1.m{rank}@v0 C1.m{rank}:gradients",
            f"B0.m{rank}@v0 C0.m{rank}:gradients A1.m1 U1@v1 X1@v0 A0.m1 U0@v1 X0@v0 C0.m{rank + 2}@v1:parameters",
        ]


@given(size=st.integers(0, 10**6), ranks=st.integers(1, 100))
def test_shards_are_the_whole_and_cut_no_value(size, ranks):
    schedule = build("zero", 2, replicas=ranks)
    shares = [schedule.placement.share(rank, size) for rank in range(2 * ranks)]
    assert sum(shares) == size
    assert all(later <= earlier <= size / (2 * ranks) + 16 for earlier, later in pairwise(shares))
    assert all(end % 16 == 0 for end in accumulate(shares) if end < size)


def test_each_rank_holds_its_share_of_every_stage():
    costs = replace(StageCosts.equal(3), parameter_bytes=(96, 48, 100))
    schedule = build("zero", 3)
    assert schedule.placement.held(costs.parameter_bytes) == [32 + 16 + 48, 32 + 16 + 48, 32 + 16 + 4]
    assert schedule.placement.live_bytes(2, (1, 1, 2), costs.parameter_bytes) == 32 + 16 + 2 * 4
    totals = simulate_totals(schedule, costs, schedule.slots(range(2)), optimizer_states=1)
    assert max(total.state_bytes_per_device for total in totals) == 2 * 96


@given(n=st.integers(2, 5), c=st.integers(1, 2), r=st.integers(1, 2), data=st.data())
@settings(deadline=None, max_examples=40)
def test_bytes_are_those_of_rings(n, c, r, data):
    """By all D ranks: 2P(D-1) for all-reduces, P(D-1) for two all-gathers and a reduce-scatter each."""
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=n * c, max_size=n * c).map(tuple))
    costs = replace(StageCosts.equal(n * c), parameter_bytes=sizes, gradient_bytes=sizes)
    for placement, times in zip(COLLECTIVE_PLACEMENTS, (2, 3), strict=True):
        schedule = build(placement, n, n * c, replicas=r)
        trace = simulate(schedule, costs, STEPS)
        assert sum(message.bytes for message in trace.messages) == STEPS * times * sum(sizes) * (n * r - 1)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_chains_are_those_of_rings(n):
    chains = [simulate(build(p, n), StageCosts.equal(n, 6, n), STEPS).max_chain_per_slot for p in COLLECTIVE_PLACEMENTS]
    assert chains == [2 * (n - 1), 2 * (n - 1)]  # zero: a reduce-scatter, then the all-gather of what it makes


@on_both
def test_rings_split_their_bytes_evenly_over_the_ranks(placement):
    trace = simulate(build(placement, 4), StageCosts.equal(4, 6, 10), STEPS)
    by_rank = [sum(m.bytes for m in trace.messages if m.source == rank) for rank in range(4)]
    assert sum(by_rank) == STEPS * (2 if placement == "replicated" else 3) * 40 * 3
    assert max(by_rank) - min(by_rank) <= STEPS * 4 * (2 if placement == "replicated" else 3)
    assert all(m.destination == (m.source + 1) % 4 for m in trace.messages)


@pytest.mark.parametrize(
    ("mode", "placement"),
    [("cdp_v1", "replicated"), ("cdp_v2", "zero"), ("dp", "pipeline"), ("dp", "model_parallel"),
     ("dp", "single_device"), ([[1, 1], [1, 1]], "replicated")],
)  # fmt: skip
def test_who_does_not_compute_at_once_is_refused_with_what_works(mode, placement):
    with pytest.raises(ValueError, match=r"use collectives=false, or mode=dp placement=replicated"):
        Schedule.build(mode, 2, placement=placement, collectives=True)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("C2.m5@v3:total", Action(Op.COLLECTIVE, 2, 5, 3, payload="total")),
        ("C2.m5:gradients", Action(Op.COLLECTIVE, 2, 5, payload="gradients")),
        ("C0.m1@v7:parameters", Action(Op.COLLECTIVE, 0, 1, 7, payload="parameters")),
    ],
)
def test_text_form_is_the_documented_one(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["C2", "C2.m5", "C2.m5:total", "C2@v3:total", "C2.m5@v1:gradients", "C2.m5:activations", "C2.m5@v3:total>1"],
)
def test_what_is_no_collective_is_refused(text):
    with pytest.raises(ValueError):
        Action.parse(text)


def corrupted(placement, change):
    """The message of the refusal of a program in which `change` has been applied to the list of actions of a slot."""
    schedule = build(placement, 3)
    slots = [[slot.number, list(slot.actions)] for slot in schedule.slots(range(STEPS))]
    change(slots)
    with pytest.raises(ScheduleError) as refusal:
        list(validated([Slot(number, tuple(actions)) for number, actions in slots], schedule.placement))
    return str(refusal.value)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_dropped_repeated_or_moved_part_is_caught(data):
    placement = data.draw(st.sampled_from(COLLECTIVE_PLACEMENTS))
    how = data.draw(st.sampled_from(["drop", "repeat", "rank", "next slot", "swap ranks"]))

    def change(slots):
        places = [(k, p) for k, (_, actions) in enumerate(slots[:-6]) for p, a in enumerate(actions) if a.op == "C"]
        k, p = data.draw(st.sampled_from(places))
        action = slots[k][1].pop(p)
        if how == "repeat":
            slots[k][1][p:p] = [action, action]
        elif how == "rank":
            slots[k][1].insert(p, action.at_rank((action.rank + 1) % 3))
        elif how == "next slot":
            slots[k + 1][1].append(action)
        elif how == "swap ranks":
            other = next(a for a in slots[k][1] if (a.op, a.payload, a.stage) == ("C", action.payload, action.stage))
            slots[k][1][slots[k][1].index(other)] = other.at_rank(action.rank)
            slots[k][1].insert(p, action.at_rank(other.rank))

    corrupted(placement, change)


def test_ranks_that_would_wait_for_each_other_are_named():
    """A rank takes part in the all-gather only after the reduce-scatter that others take part in after it."""

    def change(slots):
        actions = slots[3][1]
        (late,) = [a for a in actions if str(a).endswith(":parameters") and a.rank == 1]
        actions.remove(late)
        actions.append(late)

    assert "begins before ranks [1] take part in C1.m0@v0:parameters" in corrupted("zero", change)


def test_nobody_reads_gathered_parameters_before_all_take_part():
    def change(slots):
        actions = slots[0][1]
        (forward,) = [a for a in actions if a.op == "F" and a.rank == 1]
        actions.remove(forward)
        actions.insert(2, forward)  # only ranks 0 and 1 have taken part

    said = corrupted("zero", change)
    assert "F0.m1@v0: the parameters that it needs from rank 0, 1, 2 were not sent to rank 1" in said


def test_nobody_gathers_what_has_not_been_made():
    def change(slots):
        actions = slots[5][1]
        early = [a for a in actions if a.payload == "parameters" and a.version == 1]
        slots[5][1] = [*early, *(a for a in actions if a not in early)]

    assert "C0.m3@v1:parameters: version 1 of stage 0 is not alive" in corrupted("zero", change)


def test_a_rank_that_takes_no_part_is_named():
    def change(slots):
        slots[3][1] = [a for a in slots[3][1] if str(a) != "C2.m2:gradients"]

    assert "slot 3: ranks [2] do not take part in C2.m0:gradients" in corrupted("zero", change)
