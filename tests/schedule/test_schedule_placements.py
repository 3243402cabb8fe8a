"""What the passes derive for each placement: the closed forms of design.md, section 4, and the relay of section 3."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule import PLACEMENTS, Op, Payload, Schedule, ScheduleError, Slot, StageCosts, simulate
from cdp_repro.schedule.actions import send
from cdp_repro.schedule.placement import Placement
from cdp_repro.schedule.validation import validated

DISTRIBUTED = [name for name in PLACEMENTS if name != "single_device"]
CYCLIC = ("cdp_v1", "cdp_v2")
STEPS = 8
sizes = st.integers(2, 6)


def steady(schedule, costs=None, steps=STEPS):
    """One training step of the trace in the middle of a long run: 2S slots of the cyclic timeline."""
    costs = costs or StageCosts.equal(schedule.stages, 1, 1)
    trace = simulate(schedule, costs, steps)
    length = 2 * schedule.stages
    begin = 4 * length
    slots = range(begin, begin + length)
    return (
        [record for record in trace.records if record.slot in slots],
        [message for message in trace.messages if message.slot in slots],
    )


def sent_per_rank(messages, kinds=tuple(Payload)):
    counts = Counter()
    for message in messages:
        if message.kind in kinds:
            counts[message.source] += message.bytes
    return counts


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_the_number_of_devices(mode, n):
    ranks = {name: Schedule.build(mode, n, placement=name).ranks for name in PLACEMENTS}
    stages = n * n if mode == "dp" else n * (n + 1) // 2
    assert ranks == {"single_device": 1, "replicated": n, "zero": n, "pipeline": n, "model_parallel": stages}


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings(max_examples=12, deadline=None)
def test_replicated_sends_at_most_twice_the_parameters_and_a_ring_s_volume_on_average(n, mode):
    schedule = Schedule.build(mode, n, placement="replicated")
    records, messages = steady(schedule)
    total = sent_per_rank(messages)
    p = n  # n stages of one byte
    assert max(total.values()) <= 2 * p
    assert sum(total.values()) == 2 * p * (n - 1)  # over n ranks: 2P(N-1)/N each, a ring all-reduce's volume
    for kind in (Payload.GRADIENTS, Payload.TOTAL) if n > 2 else (Payload.GRADIENTS,):
        for end in ("source", "destination"):
            per_slot = Counter((m.slot, getattr(m, end)) for m in messages if m.kind is kind)
            assert max(per_slot.values()) == 1, f"more than one {kind} in a slot at a rank"
    assert max(max(record.versions) for record in records) == 1, "one version at a time"


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings(max_examples=12, deadline=None)
def test_zero_sends_three_times_the_parameters_but_for_what_a_rank_has_itself(n, mode):
    _, messages = steady(Schedule.build(mode, n, placement="zero"))
    p = n
    assert sum(sent_per_rank(messages).values()) == 3 * p * (n - 1)  # 3P each, less one N-th that stays on its rank
    for end in ("source", "destination"):
        lent = Counter((m.slot, getattr(m, end)) for m in messages if m.kind is Payload.PARAMETERS)
        assert max(lent.values()) == 1, "one stage in and one out in a slot"


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings(max_examples=12, deadline=None)
def test_a_pipeline_device_holds_n_minus_j_stages_and_moves_micro_batches_only(n, mode):
    schedule = Schedule.build(mode, n, placement="pipeline")
    records, messages = steady(schedule, StageCosts.equal(n, 5, 1))
    for j in range(n):
        assert max(record.activation_bytes for record in records if record.rank == j) == (n - j) * 5
        computes = [a for record in records if record.rank == j for a in record.actions if a.op.is_compute]
        assert len(computes) == 2 * n, "every slot is used: no bubble"
    assert {message.kind for message in messages} == {Payload.ACTIVATIONS, Payload.INPUT_GRADIENTS}
    assert len(messages) == 2 * n * (n - 1)


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings(max_examples=12, deadline=None)
def test_a_model_parallel_device_holds_one_micro_batch(n, mode):
    records, _ = steady(Schedule.build(mode, n, placement="model_parallel"))
    assert {record.activation_bytes for record in records} <= {0, 1}


@pytest.mark.parametrize("placement", DISTRIBUTED)
@pytest.mark.parametrize("mode", CYCLIC)
def test_the_longest_chain_of_messages_does_not_grow_with_n(placement, mode):
    chains = [
        simulate(Schedule.build(mode, n, placement=placement), StageCosts.equal(n), 5).max_chain_per_slot
        for n in (3, 4, 5, 8, 12)
    ]
    assert set(chains) == {2 if (placement, mode) == ("zero", "cdp_v2") else 1}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_with_data_parallelism_it_grows(n):
    schedule = Schedule.build("dp", n, placement="replicated")
    assert simulate(schedule, StageCosts.equal(n), 3).max_chain_per_slot == 2 * (n - 1)


@given(
    sizes=st.sampled_from([("replicated", 2, 1), ("model_parallel", 2, 1), ("model_parallel", 4, 1),
                           ("pipeline", 3, 2), ("replicated", 1, 2)]),
    c=st.integers(1, 2), mode=st.sampled_from(["dp", *CYCLIC, "matrix"]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_two_holders_exchange_what_they_have_and_wait_for_it_only_when_they_need_the_sum(sizes, c, mode):
    placement, n, r = sizes
    rule = [[1 + (2 * i + j) % 3 for j in range(c * n)] for i in range(n)] if mode == "matrix" else mode
    schedule = Schedule.build(rule, n, c * n, placement, replicas=r)
    slots = list(schedule.slots(range(5)))
    pairs = [j for j in range(c * n) if len(schedule.placement.holders(j)) == 2]
    assert pairs or (placement, n, mode) == ("model_parallel", 4, "dp")
    for j in pairs:
        backwards, sent = {}, {}
        for slot in slots:
            for action in slot.actions:
                if action.stage != j:
                    continue
                assert action.payload is not Payload.TOTAL, "nobody waits for the other's sum"
                if action.op is Op.BACKWARD:
                    backwards[action.micro_batch] = slot.number
                elif action.op is Op.SEND and action.payload is Payload.GRADIENTS:
                    sent[action.micro_batch] = slot.number
        assert sent == backwards, "each gradient, or the sum up to it, leaves as soon as it is made"
    for rank in range(schedule.ranks):
        actions = [a for slot in slots for a in slot.program_of(rank) if not a.op.is_message]
        for action, following in pairwise(actions):
            if action.op is Op.ADD and schedule.placement.is_exchanged(action.micro_batch, action.stage):
                assert (following.op, following.stage) in ((Op.UPDATE, action.stage), (Op.BACKWARD, action.stage))
                if following.op is Op.UPDATE:
                    assert following.version == schedule.mode.version_made(action.micro_batch)


@pytest.mark.parametrize("mode", CYCLIC)
def test_an_exchange_is_prepared_half_a_step_ahead_where_nothing_else_is_received(mode):
    schedule = Schedule.build(mode, 2, 6, "replicated")
    slots = {}
    for slot in schedule.slots(range(4)):
        slots |= {(a.op, a.stage, a.micro_batch): slot.number for a in slot.actions if a.op.is_message}
    ends = [place[1:] for place in slots if place[0] is Op.SEND]
    ahead = {(stage, m): slots[Op.SEND, stage, m] - slots[Op.RECEIVE, stage, m] for stage, m in ends}
    assert ahead == {(stage, m): schedule.stages * (m % 2) for stage, m in ends}
    others = Schedule.build(mode, 4, placement="model_parallel")
    for slot in others.slots(range(3)):
        sent = {(a.message, a.rank, a.peer) for a in slot.actions if a.op is Op.SEND}
        assert sent == {(a.message, a.peer, a.rank) for a in slot.actions if a.op is Op.RECEIVE}


class TwoHolders(Placement):
    """A placement that is not ours: all stages on two ranks, whatever the number of workers."""

    name = "two_holders"
    ranks = 2

    def holders(self, stage):
        return range(2)


@pytest.mark.parametrize(("n", "mode"), [(n, "dp") for n in (1, 2)] + [(n, m) for n in (1, 2, 3, 4, 6) for m in CYCLIC])
def test_a_placement_on_two_ranks_works_for_any_number_of_workers(n, mode):
    resolved = Schedule.build(mode, n).mode
    slots = list(Schedule(resolved, TwoHolders(resolved), "paper").slots(range(4)))
    assert sum(action.op is Op.UPDATE for slot in slots for action in slot.actions) == 2 * n * 4


def test_the_two_messages_of_an_exchange_do_not_wait_for_each_other():
    schedule = Schedule.build("dp", 2, placement="replicated")
    assert simulate(schedule, StageCosts.equal(2), 3).max_chain_per_slot == 1


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("mode", CYCLIC)
def test_the_total_is_relayed_in_the_order_of_need(n, mode):
    """design.md, section 3: with cdp_v2 N-1-j, N-j, ..., N-2, then 0, 1, ...; with cdp_v1 0, 1, ..., N-2."""
    schedule = Schedule.build(mode, n, placement="replicated")
    trace = simulate(schedule, StageCosts.equal(n), 6)
    for j in range(n):
        hops = [m for m in trace.messages if m.kind is Payload.TOTAL and m.stage == j and m.version == 3]
        fresh = range(n - 1 - j, n - 1) if mode == "cdp_v2" else range(0)
        stale = [rank for rank in range(n - 1) if rank not in fresh]
        assert [m.destination for m in hops] == [*fresh, *stale]
        assert [m.source for m in hops] == [n - 1, *(m.destination for m in hops[:-1])]
        step = 2
        complete = 2 * n * step + 4 * n - 3 - j
        need = {i: 2 * n * (step + (1 if i in fresh else 2)) + 2 * i + j for i in range(n - 1)}
        latest = {m.destination: need[m.destination] - 1 for m in hops}  # a rank updates then
        assert all(m.slot <= latest[m.destination] for m in hops), "there when it is needed"
        assert all(m.slot > latest[m.source] for m in hops[1:]), "nobody waits for a sum that it only hands on"
        assert [m.slot for m in hops if m.destination in fresh] == [latest[i] for i in fresh]
        if mode == "cdp_v1":
            assert [m.slot for m in hops] == [complete, *(need[i] for i in range(n - 2))], "as early as that allows"
        if fresh:
            assert hops[0].slot == complete, "worker N-1-j needs it in the very next slot"


@given(n=st.integers(3, 6), c=st.integers(1, 3), data=st.data())
@settings(max_examples=30, deadline=None)
def test_sums_that_can_wait_leave_the_links_to_those_that_cannot(n, c, data):
    """Under any bounded staleness, early sums bring no rank a second one in a slot; only urgent ones may."""
    rule = [[data.draw(st.integers(1, 3)) for _ in range(c * n)] for _ in range(n)]
    trace = simulate(Schedule.build(rule, n, c * n, "replicated"), StageCosts.equal(c * n), 8)
    first_reads = {}
    for record in trace.records:
        for action in record.actions:
            if action.op is Op.UPDATE:
                first_reads[record.rank, action.stage, action.version] = record.slot
    sums = [m for m in trace.messages if m.kind is Payload.TOTAL]
    for end in ("source", "destination"):
        per_place = {}
        for m in sums:
            is_urgent = m.slot == first_reads[m.destination, m.stage, m.version]
            per_place.setdefault((m.slot, getattr(m, end)), []).append(is_urgent)
        assert all(len(found) - sum(found) <= 1 for found in per_place.values())
        assert all(all(found) for found in per_place.values() if len(found) > 1), "a sum that could wait is in the way"


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_schedules_with_a_flush(n, schedule):
    built = Schedule.build("dp", n, placement="pipeline", pipeline_schedule=schedule)
    trace = simulate(built, StageCosts.equal(n, 1, 1), 3)
    assert len({record.slot for record in trace.records}) == 3 * 2 * (2 * n - 1), "2(N+S-1) slots a step"
    for j in range(n):
        held = max(record.activation_bytes for record in trace.records if record.rank == j)
        assert held == (n if schedule == "gpipe" else n - j)


@given(
    n=st.integers(1, 4), c=st.integers(1, 2), r=st.integers(1, 2), mode=st.sampled_from(["dp", *CYCLIC, "matrix"]),
    placement=st.sampled_from(DISTRIBUTED), order=st.sampled_from(["paper", "backward_first"]),
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_program_is_valid_over_drains_and_every_action_has_one_rank(n, c, r, mode, placement, order, parts):
    rule = [[1 + (2 * i + j) % 3 for j in range(c * n)] for i in range(n)] if mode == "matrix" else mode
    schedule = Schedule.build(rule, n, c * n, placement, order, replicas=r)
    step, slot, computes = 0, 0, []
    for part in parts:
        for current in schedule.slots(range(step, step + part), slot):
            slot = current.number + 1
            computes += [(a.op, a.stage, a.micro_batch) for a in current.actions if a.op.is_compute]
            ranks = [current.program_of(rank) for rank in range(schedule.ranks)]
            assert Counter(a for program in ranks for a in program) == Counter(current.actions)
        step += part
    assert sorted(computes) == sorted(
        (op, j, m) for op in (Op.FORWARD, Op.BACKWARD) for j in range(c * n) for m in range(step * n * r)
    )


# --- every way to corrupt the communication of a valid program is caught


def slots_of(placement, mode="cdp_v2", n=3):
    schedule = Schedule.build(mode, n, placement=placement)
    return schedule, [[slot.number, list(slot.actions)] for slot in schedule.slots(range(4))]


def refused(schedule, slots):
    with pytest.raises(ScheduleError) as refusal:
        list(validated([Slot(number, tuple(actions)) for number, actions in slots], schedule.placement))
    return str(refusal.value)


def places_of(slots, keep):
    return [(k, p) for k, (_, actions) in enumerate(slots) for p, action in enumerate(actions) if keep(action)]


@given(
    placement=st.sampled_from(DISTRIBUTED), which=st.integers(0, 10**6), mode=st.sampled_from(["dp", *CYCLIC]),
    op=st.sampled_from([Op.SEND, Op.RECEIVE, Op.ADD]), n=st.sampled_from([2, 3]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_a_missing_action_is_caught(placement, which, mode, op, n):
    schedule, slots = slots_of(placement, mode, n)
    places = places_of(slots, lambda a: a.op is op and a.payload is not Payload.BUFFERS)
    if places:
        slot, place = places[which % len(places)]
        del slots[slot][1][place]
        refused(schedule, slots)


@given(
    placement=st.sampled_from(DISTRIBUTED), which=st.integers(0, 10**6), mode=st.sampled_from(["dp", *CYCLIC]),
    n_and_shift=st.sampled_from([(2, 1), (3, 1), (3, 2)]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_an_action_on_another_rank_is_caught(placement, which, mode, n_and_shift):
    n, shift = n_and_shift
    schedule, slots = slots_of(placement, mode, n)
    places = places_of(slots, lambda a: True)
    slot, place = places[which % len(places)]
    action = slots[slot][1][place]
    slots[slot][1][place] = action.at_rank((action.rank + shift) % schedule.ranks)
    refused(schedule, slots)


@given(
    placement=st.sampled_from(DISTRIBUTED), which=st.integers(0, 10**6), mode=st.sampled_from(["dp", *CYCLIC]),
    n=st.sampled_from([2, 3]), op=st.sampled_from([Op.SEND, Op.RECEIVE]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_messages_between_two_ranks_in_another_order_at_one_end_are_caught(placement, which, mode, n, op):
    schedule, slots = slots_of(placement, mode, n)
    places = places_of(slots, lambda a: a.op is op)
    a, i = places[which % len(places)]
    first = slots[a][1][i]
    ends = ((b, j, slots[b][1][j]) for b, j in places if (b, j) > (a, i))
    later = [(b, j) for b, j, end in ends if end.peer == first.peer and end.rank == first.rank]
    later = [(b, j) for b, j in later if slots[b][1][j] != first]
    if later:
        b, j = later[0]
        slots[a][1][i], slots[b][1][j] = slots[b][1][j], slots[a][1][i]
        refused(schedule, slots)


@pytest.mark.parametrize("placement", DISTRIBUTED)
def test_a_receive_may_be_early_but_nothing_may_wait_for_it_before_its_send(placement):
    schedule, slots = slots_of(placement)
    slot, place = places_of(slots, lambda a: a.op is Op.RECEIVE)[0]
    slots[0][1].insert(0, slots[slot][1].pop(place))
    list(validated([Slot(number, tuple(actions)) for number, actions in slots], schedule.placement))
    slot, place = places_of(slots, lambda a: a.op is Op.SEND)[0]
    slots[-1][1].append(slots[slot][1].pop(place))
    refused(schedule, slots)


def test_gradients_out_of_order_are_caught():
    schedule, slots = slots_of("zero")
    ((a, i), (b, j), *_) = places_of(slots, lambda x: x.op is Op.ADD and x.stage == 0)
    slots[a][1][i], slots[b][1][j] = slots[b][1][j], slots[a][1][i]
    refused(schedule, slots)


@pytest.mark.parametrize("mode", ["dp", *CYCLIC])
def test_sending_to_the_other_of_two_holders_what_has_been_added_to_already_is_caught(mode):
    schedule, slots = slots_of("replicated", mode, n=2)
    add_slot, add = places_of(slots, lambda x: x.op is Op.ADD and (x.rank, x.stage, x.micro_batch) == (1, 1, 0))[0]
    slot, place = places_of(slots, lambda x: x.op is Op.SEND and (x.stage, x.micro_batch) == (1, 1))[0]
    early = slots[add_slot][1].pop(add)
    slots[slot][1].insert(place, early)
    assert "the sum on its rank is of the micro-batches []" in refused(schedule, slots)


def test_a_message_that_nobody_needs_is_caught():
    schedule, slots = slots_of("pipeline")
    slots[-1][1] += send(Payload.INPUT_GRADIENTS, 1, 1, 0, micro_batch=11)
    assert "unused" in refused(schedule, slots)
