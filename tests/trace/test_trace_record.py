"""Records and messages, and what is read off them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Action, Op, Program, Schedule, Value
from cdp_repro.schedule.actions import send
from cdp_repro.schedule.branches import two_towers
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.trace import Message, SlotRecord, Trace, TraceRecorder
from cdp_repro.trace.record import message_name


def record(slot, rank, peak=0, after=0, actions=()):
    return SlotRecord(slot, rank, actions, peak, after, (1,), ((0.0, 1.0),) * len(actions))


def trace_of(*records, messages=(), m=2):
    return Trace(Sizes(1, m), Lanes(m), records, messages)


def test_a_rank_that_does_nothing_in_a_slot_still_holds_its_activations():
    trace = trace_of(record(0, 0, 5, 4), record(1, 1, 7, 7), record(2, 0, 4, 0), record(3, 1, 7, 0))
    assert trace.activation_bytes_per_slot == {0: 5, 1: 4 + 7, 2: 4 + 7, 3: 0 + 7}
    assert trace.activation_peak_bytes_total == 11
    assert trace.activation_peak_bytes_per_device == 7


def test_a_slot_in_which_no_rank_acts_has_what_all_hold():
    trace = trace_of(record(1, 0, 5, 4), record(1, 1, 3, 2), record(4, 0, 4, 0))
    assert trace.activation_bytes_per_slot == {1: 5 + 3, 2: 4 + 2, 3: 4 + 2, 4: 4 + 2}
    assert [[(r.slot, r.rank, r.activation_bytes_at_end) for r in records] for records in trace.of_each_slot()] == [
        [(1, 0, 4), (1, 1, 2)], [(2, 0, 4), (2, 1, 2)], [(3, 0, 4), (3, 1, 2)], [(4, 0, 0), (4, 1, 2)],
    ]  # fmt: skip


def test_an_empty_trace_has_no_numbers():
    empty = trace_of()
    assert (empty.activation_peak_bytes_total, empty.activation_peak_bytes_per_device, empty.versions_kept) == (0, 0, 0)
    assert (empty.max_messages_per_slot, empty.max_chain_per_slot, empty.idle_share(4)) == (0, 0, 0.0)
    assert empty.measured_slots(4) == (range(0), 1)


def hop(source, destination, members, size=8):
    """A message with a sum of stage 0, in slot 0: what is sent, what receives it, and its record."""
    value = Value("g", 0, members[0], stop=members[-1] + 1)
    sender, receiver = send(value, source, destination)
    return sender, receiver, Message(0, source, destination, "gradients", 0, size, value)


def test_messages_are_counted_and_chained_if_one_waits_for_the_other():
    (s0, r0, m0), (s1, r1, m1) = hop(0, 1, [0]), hop(1, 2, [0, 1])
    add = Action.parse("A g0[0:2]: g0[0:1]! g0[1:2]! -> g0[0:2]", rank=1)

    def trace(*middle):
        programs = [(s0,), middle, (r1,)]
        return trace_of(*(record(0, rank, actions=own) for rank, own in enumerate(programs)), messages=(m0, m1), m=3)

    assert trace(r0, add, s1).max_chain_per_slot == 2
    assert trace(r0, s1, add).max_chain_per_slot == 1, "what is sent before the wait does not depend on it"
    assert trace(r0, add, s1).max_messages_per_slot == 2
    assert trace_of(messages=(m0,), m=3).bytes_sent_per_device_per_step(2) == 0  # no rank is on record
    unsent = trace_of(
        *(record(0, r, actions=own) for r, own in enumerate([(s0,), (r0, add, s1), (r1,)])), messages=(m1,)
    )
    assert unsent.max_chain_per_slot == 1, "what has no bytes is never sent"


def test_traces_of_ranks_are_merged_in_the_order_of_slots():
    (_, _, m0), (_, _, m1) = hop(0, 1, [0]), hop(1, 0, [1])
    parts = [([record(0, 1), record(2, 1)], [m1]), ([record(0, 0), record(1, 0)], [m0])]
    merged = Trace.merged(Sizes(1, 2), Lanes(2), parts)
    assert [(r.slot, r.rank) for r in merged.records] == [(0, 0), (0, 1), (1, 0), (2, 1)]
    assert merged.messages == (m0, m1)


def test_a_recorder_keeps_the_peak_within_a_slot_and_what_is_left_after_it():
    recorder = TraceRecorder(0, 2, Sizes(1, 2))
    texts = ["F0.m0@v0: p0@v0 b0.w0! -> s0.m0 d0.m0 b0.w0", "B0.m0@v0: s0.m0! d0.m0! p0@v0 -> g0[0:1]"]
    forward, backward = map(Action.parse, texts)
    recorder.record(3, forward, 10, [1], (0.0, 1.0))
    recorder.record(3, backward, 4, [1], (1.0, 2.0))
    recorder.record(5, backward, 0, [2], (2.0, 3.0))
    gradient, total = Value("g", 0, 0, stop=1), Value("g", 0, 0, stop=2)
    recorder.sent(5, send(gradient, 0, 1)[0], 7)
    recorder.sent(5, send(total, 0, 1)[0], 7)
    recorder.sent(5, Action(Op.COLLECTIVE, 0, 0, value=total, reads=(gradient,), writes=(total,)), 9)
    records, messages = recorder.finish()
    assert [(r.slot, r.activation_peak_bytes, r.activation_bytes_at_end, r.versions) for r in records] == [
        (3, 10, 4, (1,)),
        (5, 4, 0, (2,)),
    ]
    assert [(m.kind, m.destination, m.bytes) for m in messages] == [
        ("gradients", 1, 7),
        ("total", 1, 7),
        ("total", 1, 9),
    ]


@pytest.mark.parametrize(
    ("mode", "placement"), itertools.product(("dp", "cdp_v1", "cdp_v2"), ("pipeline", "replicated"))
)
def test_a_step_is_measured_from_its_first_forward_on_before_the_drain_begins(mode, placement):
    program = Program(Schedule.build(mode, 3, placement=placement, accumulate=2))
    length = program.schedule.slots_per_step
    trace = simulate(program, StageCosts.equal(3), 4)
    assert trace.measured_slots(length) == (range(2 * length, 3 * length), 1)


def trace_of_runs(program, *lengths):
    """Return the trace of runs of these many steps, with a drain after each, as if each had begun with step 0."""
    records, messages, begins, step = [], [], [0], 0
    for length in lengths:
        run = simulate(program, StageCosts.equal(program.schedule.stages), length)
        ahead = program.schedule.ahead(step)
        for each in run.records:
            moved = tuple(action.shifted(*ahead) for action in each.actions)
            records.append(replace(each, slot=begins[-1] + each.slot, actions=moved))
        messages += [replace(each, slot=begins[-1] + each.slot) for each in run.messages]
        begins.append(begins[-1] + run.records[-1].slot + 1)
        step += length
    return Trace(run.sizes, run.lanes, tuple(records), tuple(messages), tuple(begins[:-1]), fill=run.fill)


@pytest.mark.parametrize(
    ("mode", "placement"),
    itertools.product(("dp", "cdp_v1", "cdp_v2"), ("replicated", "zero", "model_parallel", "pipeline")),
)
def test_a_drain_among_the_traced_steps_changes_no_traffic(mode, placement):
    program = Program(Schedule.build(mode, 3, placement=placement))
    length = program.schedule.slots_per_step
    long = program.steady_step + 2
    steady = trace_of_runs(program, long)
    assert steady.messages_per_step(length) and steady.idle_share(length) < 1
    for lengths in ((1, 1, 1, 1), (2, 2), (1, 2, 1), (1, long), (long, 1), (2, 3)):
        trace = trace_of_runs(program, *lengths)
        assert trace.messages_per_step(length) == steady.messages_per_step(length), lengths
        sent = trace.bytes_sent_per_device_per_step(length)
        assert sent == pytest.approx(steady.bytes_sent_per_device_per_step(length)), lengths
        if max(lengths) >= long:
            assert trace.idle_share(length) == steady.idle_share(length), lengths
        else:
            assert steady.idle_share(length) <= trace.idle_share(length) < 1, lengths


@pytest.mark.parametrize("mode", ["pipedream", "ampnet"])
def test_steps_of_a_long_fill_are_no_steps_of_the_steady_state(mode):
    program = Program(Schedule.build(mode, 4, placement="pipeline"))
    length = program.schedule.slots_per_step
    full = trace_of_runs(program, 12)
    assert full.idle_share(length) == 0
    for lengths in ((3, 3), (3,) * 4):  # checkpoints in the fill
        trace = trace_of_runs(program, *lengths)
        assert 0 < trace.idle_share(length) < 1 and trace.measured_slots(length)[1] == sum(lengths)
    begun = replace(full, records=tuple(each for each in full.records if each.slot < 3 * length), is_cut=True)
    assert begun.measured_slots(length) == (range(0), 1)


@pytest.mark.parametrize(("mode", "placement"), [("dp", "replicated"), ("cdp_v2", "model_parallel")])
def test_a_slot_has_the_actions_of_all_ranks(mode, placement):
    program = Program(Schedule.build(mode, 3, placement=placement))
    slots = simulate(program, StageCosts.equal(3), steps=2).slots
    assert [slot.number for slot in slots] == list(range(len(slots)))
    for slot, made in zip(slots, program.slots(2), strict=False):
        assert sorted(map(str, slot.actions)) == sorted(map(str, made.actions))
        assert {action.rank for action in slot.actions} == {action.rank for action in made.actions}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("x3.m5", ("activations", 2)), ("d1.m5", ("input_gradients", 2)), ("g2[4:8]", ("total", 2)),
        ("g2[4:7]", ("gradients", 2)), ("g2[4:8]#1/4", ("gradients", 2)), ("pf2.m5@v3", ("parameters", 2)),
        ("pb2.m5@v3", ("parameters", 2)), ("b2.w1", ("buffers", 2)),
    ],
)  # fmt: skip
def test_messages_are_named_by_what_they_carry_and_the_stage_that_made_it(value, name):
    assert message_name(Value.parse(value), 4, (1, 2, 3, -1)) == name


def test_a_gradient_of_an_output_is_made_by_the_stage_that_reads_it_whatever_branch_it_is_on():
    sizes = Schedule.build("cdp_v2", 6, sources=two_towers(6)).sizes
    made = [message_name(Value("d", stage, 0), 6, sizes.readers) for stage in range(5)]
    assert made == [("input_gradients", stage) for stage in (1, 4, 3, 4, 5)]
    assert message_name(Value("x", 2, 0), 6, sizes.readers) == ("activations", 1)
