"""`simulate` against the closed forms of design.md, section 4."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import Action, Message, Payload, Schedule, SlotRecord, StageCosts, Trace, simulate
from cdp_repro.schedule.actions import send

UNIT = 840  # bytes of a stage; divisible by what the forms divide by


def run(mode, n, order, steps=4):
    return simulate(Schedule.build(mode, n, slot_order=order), StageCosts.equal(n, UNIT), steps)


@pytest.mark.parametrize(("n", "order"), itertools.product(range(1, 9), ("paper", "backward_first")))
def test_peaks_of_equal_stages_are_the_closed_forms(n, order):
    a = n * UNIT
    assert run("dp", n, order).activation_peak_bytes_total == n * a
    for mode in ("cdp_v1", "cdp_v2"):
        trace = run(mode, n, order)
        # backward first: N/2 * A, which odd N rounds up to whole stages (the live bytes alternate by one stage)
        peak = (n + 1) * a // 2 if order == "paper" else (n * n + 1) // 2 * UNIT
        assert trace.activation_peak_bytes_total == trace.activation_peak_bytes_per_device == peak
        steady = [live for slot, live in trace.activation_bytes_per_slot.items() if 2 * n - 1 <= slot < 2 * n * 4]
        if n > 1:
            assert set(steady) == {peak}, "total activation memory is flat in the steady state"


@pytest.mark.parametrize("n", range(1, 7))
def test_dp_fills_and_empties(n):
    live = run("dp", n, "paper", steps=1).activation_bytes_per_slot
    rising = [n * UNIT * (k + 1) for k in range(n)]
    assert [live[k] for k in range(2 * n)] == [*rising, *reversed(rising)]


@pytest.mark.parametrize("n", range(1, 7))
def test_cdp_returns_to_zero(n):
    for mode, order in itertools.product(("dp", "cdp_v1", "cdp_v2"), ("paper", "backward_first")):
        # the peak of the last slot is what its last backward releases (in DP, those of all workers)
        last = run(mode, n, order).records[-1]
        assert last.activation_bytes == (n if mode == "dp" else 1) * UNIT


@pytest.mark.parametrize("n", range(1, 6))
def test_versions_kept(n):
    assert run("dp", n, "paper").versions_kept == 1
    assert run("cdp_v1", n, "paper").versions_kept == 2
    assert run("cdp_v2", n, "paper").versions_kept == (2 if n > 1 else 1)
    for most in (1, 2, 3, 5):
        matrix = [[most if (i, j) == (n - 1, 0) else 1 for j in range(n)] for i in range(n)]
        trace = simulate(Schedule.build(matrix, n), StageCosts.equal(n), most + 3)
        assert trace.versions_kept == most + 1
        if n > 1:
            assert max(record.versions[-1] for record in trace.records) == 2, "per stage, not for all the most"


@st.composite
def runs(draw):
    n, c = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    forward = draw(st.lists(st.integers(0, 50), min_size=n * c, max_size=n * c))
    backward = draw(st.permutations(forward))
    return n, n * c, forward, backward, draw(st.sampled_from(("dp", "cdp_v1", "cdp_v2")))


@given(runs(), st.sampled_from(("paper", "backward_first")))
@settings(deadline=None, max_examples=40)
def test_peak_of_every_slot_by_direct_summation(run_, order):
    """From the closed forms of the slots alone: what is alive at the start, plus what the order lets overlap."""
    n, s, forward, backward, mode = run_
    steps, c = 3, s // n
    zeros = (0,) * s
    costs = StageCosts(tuple(forward), tuple(backward), zeros, zeros, zeros)
    live = simulate(Schedule.build(mode, n, s, slot_order=order), costs, steps).activation_bytes_per_slot
    takes, gives = {}, {}
    for t, i, j in itertools.product(range(steps), range(n), range(s)):
        begin = 2 * s * t if mode == "dp" else 2 * c * (t * n + i)
        takes[begin + j] = takes.get(begin + j, 0) + forward[j]
        end = begin + 2 * s - 1 - j
        gives[end] = gives.get(end, 0) + backward[j]
    total = 0
    for slot in sorted(live):
        up, down = takes.get(slot, 0), gives.get(slot, 0)
        assert live[slot] == total + (up if order == "paper" else max(0, up - down))
        total += up - down
    assert total == 0


def test_first_use_is_from_the_initial_parameters():
    trace = run("cdp_v1", 3, "paper")
    assert trace.records[0].versions == (1, 1, 1)
    assert str(trace.records[0].actions[0]) == "F0.m0@v0"


def test_flops_per_slot():
    costs = StageCosts((0, 0), (0, 0), (0, 0), (3, 5), (7, 11))
    assert simulate(Schedule.build("dp", 2), costs, 1).flops_per_slot(costs) == {0: 6, 1: 10, 2: 22, 3: 14}
    assert simulate(Schedule.build("cdp_v1", 2), costs, 1).flops_per_slot(costs) == {
        0: 3,
        1: 5,
        2: 14,
        3: 12,
        4: 11,
        5: 7,
    }


def test_flops_per_slot_are_summed_over_ranks():
    costs = StageCosts((0,), (0,), (0,), (3,), (7,))
    (record,) = simulate(Schedule.build("dp", 1), costs, 1).records[:1]
    other = SlotRecord(record.slot, 1, record.actions, 0, 0, (1,), record.spans)
    assert Trace(2, 1, (record, other)).flops_per_slot(costs) == {0: 6}


def test_a_rank_that_does_nothing_in_a_slot_still_holds_its_activations():
    def record(slot, rank, peak, after):
        return SlotRecord(slot, rank, (), peak, after, (1,), ())

    trace = Trace(2, 1, (record(0, 0, 5, 4), record(1, 1, 7, 7), record(2, 0, 4, 0), record(3, 1, 7, 0)))
    assert trace.activation_bytes_per_slot == {0: 5, 1: 4 + 7, 2: 4 + 7, 3: 0 + 7}
    assert trace.activation_peak_bytes_total == 11


def hop(source, destination, micro_batch, size=8):
    """A message with the sum of stage 0, in slot 0: what is sent, what receives it, and its record."""
    sender, receiver = send(Payload.GRADIENTS, 0, source, destination, micro_batch=micro_batch)
    return sender, receiver, Message(0, source, destination, Payload.GRADIENTS, 0, size, micro_batch)


def test_messages_are_counted_and_chained_if_one_waits_for_the_other():
    (s0, r0, m0), (s1, r1, m1) = hop(0, 1, 0), hop(1, 2, 1)
    add = Action.parse("A0.m0", rank=1)

    def trace(*middle):
        programs = [(s0,), middle, (r1,)]
        records = tuple(SlotRecord(0, rank, actions, 0, 0, (1,), ()) for rank, actions in enumerate(programs))
        return Trace(3, 1, records, (m0, m1))

    assert trace(r0, add, s1).max_chain_per_slot == 2
    assert trace(r0, s1, add).max_chain_per_slot == 1, "what is sent before the wait does not depend on it"
    assert trace(r0, add, s1).max_messages_per_slot == 2
    assert Trace(3, 1, (), (m0,)).bytes_sent_per_device_per_step(2) == 0  # no rank is on record


@pytest.mark.parametrize(("placement", "sent"), [("replicated", 2), ("zero", 3)])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_sent_in_a_step_are_those_of_the_steady_state(placement, sent, n):
    schedule = Schedule.build("cdp_v2", n, placement=placement)
    trace = simulate(schedule, StageCosts.equal(n), 5)
    end = 3 * 2 * n  # as a run that traces 3 of its steps
    cut = Trace(n, n, tuple(r for r in trace.records if r.slot < end), tuple(m for m in trace.messages if m.slot < end))
    assert cut.bytes_sent_per_device_per_step(schedule.mode.slots_per_step) == sent * (n - 1)  # P = n stages of 1 byte


@pytest.mark.parametrize(
    "arguments",
    [
        ((1, 2), (1, 2), (1,), (1, 1), (1, 1)),
        ((1, 2), (1,), (1, 1), (1, 1), (1, 1)),
        ((1, 2), (2, 2), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_costs_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError):
        StageCosts(*arguments)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"3 stages but the costs are of 2"):
        simulate(Schedule.build("dp", 3), StageCosts.equal(2), 1)


def test_costs_add_up():
    costs = StageCosts.equal(3, activation_bytes=5, parameter_bytes=7, flops=11)
    assert costs.stages == 3
    assert costs.activation_bytes == 15
    assert costs.backward_flops == (22, 22, 22)
