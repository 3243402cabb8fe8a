"""Exchanged gradients in parts: everything leaves once, in time, in the order of need; the two ends of each agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from cdp_repro.schedule.pacing import MIN_PART_BYTES, _Lane, is_paced, pace, parts_of
from cdp_repro.schedule.validation import validated
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.pricing import Cluster, Link, price
from cdp_repro.schedule import Action, Op, Payload, Schedule, ScheduleError, Slot, StageCosts, part_of, simulate

STEPS = 5
MIB = 2**20
RESNET = tuple(round(share * 45 * MIB) for share in (0.01, 0.01, 0.05, 0.19, 0.33, 0.42))
"""About the gradients of six stages of ResNet-18."""


@st.composite
def schedules(draw):
    n, r = draw(st.sampled_from([(2, 1), (1, 2)]))
    s = n * draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 40 * MIB), min_size=s, max_size=s))
    modes = ["dp", "cdp_v1", "cdp_v2", [[1 + (i + j) % 3 for j in range(s)] for i in range(n)]]
    return Schedule.build(draw(st.sampled_from(modes)), n, s, "replicated", replicas=r, gradient_bytes=sizes)


@given(schedule=schedules(), begin=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_every_part_leaves_once_and_before_anyone_adds(schedule, begin):
    sizes, parts = schedule.gradient_bytes, parts_of(schedule.gradient_bytes)
    if not is_paced(schedule.placement, sizes):
        parts = (1,) * len(sizes)
    sent = Counter()
    arrived = defaultdict(set)
    for slot in schedule.slots(range(STEPS), begin):  # valid, or this raises
        for action in slot.actions:
            if action.op is Op.SEND:
                part = action.part or 1
                sent[action.micro_batch, action.stage] += len(part_of(sizes[action.stage], part, parts[action.stage]))
                arrived[action.peer, action.micro_batch, action.stage].add(part)
            elif action.op is Op.ADD:
                place = action.rank, action.micro_batch, action.stage
                assert arrived[place] == {*range(1, parts[action.stage] + 1)}
    assert sent == Counter({(m, j): size for m in range(2 * STEPS) for j, size in enumerate(sizes)})


def due(schedule, worker, stage):
    """The slot, after a worker's first forward, in which the other rank reads what its gradients make, or computes the
    next of its own: seen in the program."""
    first, other, begins = 2 * 2 + worker, 1 - worker, None
    for slot in schedule.slots(range(STEPS + 3)):
        for action in slot.actions:
            if (action.op, action.stage, action.micro_batch) == (Op.FORWARD, 0, first):
                begins = slot.number
            if action.rank != other or action.stage != stage or begins is None or action.micro_batch is None:
                continue
            reads = action.op is Op.FORWARD and action.version >= 3
            if reads or (action.op is Op.BACKWARD and action.micro_batch >= 6):
                return slot.number - begins
    raise AssertionError


@given(schedule=schedules())
@settings(deadline=None, max_examples=60)
def test_a_rank_sends_a_mean_stage_a_slot_and_what_is_needed_first_first(schedule):
    sizes, parts, stages = schedule.gradient_bytes, parts_of(schedule.gradient_bytes), schedule.stages
    mean = sum(sizes) / stages
    for worker in range(2):
        needed = [due(schedule, worker, stage) for stage in range(stages)]
        sent = {}
        plan = pace(schedule.mode, worker, sizes)
        assert len(plan) == sum(parts)
        for departure in plan:
            made = {j for j in range(stages) if 2 * stages - 1 - j <= departure.slot}
            waiting = {(needed[j], j, k) for j in made for k in range(1, parts[j] + 1)} - sent.keys()
            this = needed[departure.stage], departure.stage, departure.part
            assert this == min(waiting), "first what is needed first, and only what there is"
            size = len(part_of(sizes[departure.stage], departure.part, parts[departure.stage]))
            before = sum(size for slot, size in sent.values() if slot == departure.slot)
            assert before == 0 or before + size <= mean or this[0] <= departure.slot + 1
            sent[this] = departure.slot, size


@pytest.mark.parametrize("mode", ["dp", "cdp_v2"])
def test_messages_leave_as_planned_and_the_other_rank_is_ready_in_its_own_backward(mode):
    """In the steady state nothing is forced; worker 0 is half a training step ahead of worker 1."""
    schedule = Schedule.build(mode, 2, 6, "replicated", gradient_bytes=RESNET)
    begins, sends, receives = {}, defaultdict(list), defaultdict(list)
    for slot in schedule.slots(range(STEPS)):
        for action in slot.actions:
            if action.op is Op.FORWARD and action.stage == 0:
                begins[action.micro_batch] = slot.number
            for op, found in ((Op.SEND, sends), (Op.RECEIVE, receives)):
                if action.op is op:
                    found[action.micro_batch].append((slot.number, action.stage, action.part or 1))
    for m in range(2, 2 * STEPS - 4):
        plan = [(begins[m] + each.slot, each.stage, each.part) for each in pace(schedule.mode, m % 2, RESNET)]
        ahead = 6 if m % 2 and mode == "cdp_v2" else 0
        assert sends[m] == plan
        assert receives[m] == [(slot - ahead, stage, part) for slot, stage, part in plan]


def test_parts_are_halves_of_the_mean_stage_of_what_is_much_larger():
    assert parts_of(RESNET) == (1, 1, 1, 1, 4, 5)
    assert parts_of([MIB] * 8) == (1,) * 8
    assert parts_of([0, 0]) == (1, 1)
    assert parts_of([1, MIN_PART_BYTES - 1]) == (1, 1), "small parts take longer to begin than to send"
    assert parts_of([1, 3 * MIN_PART_BYTES]) == (1, 3)


def test_small_gradients_that_are_needed_first_overtake_large_ones():
    """Worker 1's next forward begins with stage 0, whose gradients worker 0 makes last."""
    mode = Schedule.build("cdp_v2", 2, 6).mode
    first, last = ([departure.stage for departure in pace(mode, worker, RESNET)] for worker in range(2))
    assert first == [5, 5, 4, 4, 3, 2, 4, 1, 4, 0, 5, 5, 5]
    assert last == [5, 5, 4, 4, 3, 4, 4, 5, 5, 5, 2, 1, 0], "worker 0's next forward reads only stages 3 to 5 fresh"


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
@pytest.mark.parametrize("sizes", [(), (MIB,) * 6, (100, 1, 1, 1, 1, 1)], ids=["unknown", "even", "small"])
def test_even_and_small_stages_are_sent_as_they_are(mode, sizes):
    plain = Schedule.build(mode, 2, 6, "replicated")
    assert list(Schedule.build(mode, 2, 6, "replicated", gradient_bytes=sizes).slots(range(3))) == list(
        plain.slots(range(3))
    )


@pytest.mark.parametrize(
    ("placement", "n", "r"),
    [
        ("single_device", 2, 1),
        ("zero", 2, 1),
        ("pipeline", 2, 1),
        ("pipeline", 2, 2),
        ("model_parallel", 2, 1),
        ("replicated", 3, 1),
    ],
)
def test_only_two_ranks_that_exchange_everything_send_parts(placement, n, r):
    schedule = Schedule.build("cdp_v2", n, 6, placement, replicas=r, gradient_bytes=RESNET)
    assert all(action.parts == 1 for slot in schedule.slots(range(3)) for action in slot.actions)


def test_sizes_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="gradient_bytes has 3 entries: give 2"):
        Schedule.build("cdp_v2", 2, 2, "replicated", gradient_bytes=(1, 2, 3))
    with pytest.raises(ValueError, match="gradient_bytes has 3 entries: give 2"):
        Schedule.build("cdp_v2", 2, 2, "replicated").sized((1, 2, 3))


def test_what_leaves_in_parts_is_validated_before_anything_starts(monkeypatch):
    plain = Schedule.build("cdp_v2", 2, 6, "replicated")
    assert plain.sized(RESNET) == Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET)
    monkeypatch.setattr(_Lane, "sends", lambda *_: [])
    monkeypatch.setattr(_Lane, "rest_of", lambda *_: [])
    with pytest.raises(ScheduleError):
        plain.sized(RESNET)


@pytest.mark.parametrize("seconds_of_link_over_compute", [0.8, 1.0, 1.2])
def test_a_step_over_a_slow_link_is_shorter_by_a_tenth_at_least(seconds_of_link_over_compute):
    costs = replace(StageCosts.equal(6), parameter_bytes=RESNET, gradient_bytes=RESNET)
    link = Link(0.0, sum(RESNET) / (18 * seconds_of_link_over_compute))
    cluster = replace(Cluster.equal(6, 1.0, 2.0), within_host=link, devices_per_host=2)
    plain, paced = (
        price(Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=sizes), costs, cluster).step_seconds
        for sizes in ((), RESNET)
    )
    assert paced < 0.9 * plain


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_parts_that_are_dropped_repeated_or_swapped_are_caught(data):
    schedule = Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET)
    slots = [[slot.number, list(slot.actions)] for slot in schedule.slots(range(STEPS))]
    places = [(k, p) for k, (_, actions) in enumerate(slots) for p, a in enumerate(actions) if a.part or a.parts > 1]
    k, p = data.draw(st.sampled_from(places))
    action = slots[k][1][p]
    how = data.draw(st.sampled_from(["drop", "repeat", "other part"]))
    if how == "other part" and action.part is not None:
        slots[k][1][p] = replace(action, part=action.part % action.parts + 1)
    elif how == "repeat":
        slots[k][1].insert(p, action)
    else:
        del slots[k][1][p]
    with pytest.raises(ScheduleError):
        list(validated([Slot(number, tuple(actions)) for number, actions in slots], schedule.placement))


def test_messages_of_a_trace_are_parts_with_their_bytes():
    costs = replace(StageCosts.equal(6), parameter_bytes=RESNET, gradient_bytes=RESNET)
    trace = simulate(Schedule.build("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET), costs, 2)
    assert sum(m.bytes for m in trace.messages) == 2 * 2 * sum(RESNET)
    assert {m.part for m in trace.messages if m.stage == 5} == {1, 2, 3, 4, 5}
    assert trace.max_chain_per_slot == 1


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("S2.m5:gradients>1#1/4", Action(Op.SEND, 2, 5, payload=Payload.GRADIENTS, peer=1, part=1, parts=4)),
        ("R2.m5:gradients<1#4/4", Action(Op.RECEIVE, 2, 5, payload=Payload.GRADIENTS, peer=1, part=4, parts=4)),
        ("A2.m5#4", Action(Op.ADD, 2, 5, parts=4)),
    ],
)
def test_text_form_of_parts_is_the_documented_one(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["S2.m5:gradients>1#4", "S2.m5:gradients>1#5/4", "S2.m5:gradients>1#0/4", "S2.m5:gradients>1#1/1", "A2.m5#1/4",
     "F2.m5@v1#4", "S2.m5:activations>1#1/4", "U2@v3#2"],
)  # fmt: skip
def test_what_is_no_part_is_refused(text):
    with pytest.raises(ValueError):
        Action.parse(text)
