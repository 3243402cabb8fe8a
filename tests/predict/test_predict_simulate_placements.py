"""What each placement sends and holds: the closed forms of design.md, section 4."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing import Cluster, Link, price
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, PLACEMENTS, Program, Schedule
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.trace import Trace

DISTRIBUTED = [name for name in PLACEMENTS if name != "single_device"]
CYCLIC = ("cdp_v1", "cdp_v2")
STEPS = 8
MIB = 2**20
RESNET = tuple(round(share * 45 * MIB) for share in (0.01, 0.01, 0.05, 0.19, 0.33, 0.42))
sizes = st.integers(2, 6)
settings_ = settings(max_examples=12, deadline=None, derandomize=True)


def program(mode, n, s=None, placement="single_device", **options):
    return Program(Schedule.build(mode, n, s, placement, **options))


def steady(built, costs=None, steps=STEPS):
    """One training step of the trace in the middle of a long run: 2S slots of the cyclic timeline."""
    costs = costs or StageCosts.equal(built.schedule.stages, 1, 1)
    trace = simulate(built, costs, steps)
    length = 2 * built.schedule.stages
    begin = 4 * length
    slots = range(begin, begin + length)
    return (
        [record for record in trace.records if record.slot in slots],
        [message for message in trace.messages if message.slot in slots],
    )


def sent_per_rank(messages):
    counts = Counter()
    for message in messages:
        counts[message.source] += message.bytes
    return counts


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings_
def test_replicated_sends_at_most_twice_the_parameters_and_a_ring_s_volume_on_average(n, mode):
    records, messages = steady(program(mode, n, placement="replicated"))
    total = sent_per_rank(messages)
    p = n  # n stages of one byte
    assert max(total.values()) <= 2 * p
    assert sum(total.values()) == 2 * p * (n - 1)  # over n ranks: 2P(N-1)/N each, a ring all-reduce's volume
    for kind in ("gradients", "total") if n > 2 else ("gradients",):
        for end in ("source", "destination"):
            per_slot = Counter((m.slot, getattr(m, end)) for m in messages if m.kind == kind)
            assert max(per_slot.values()) == 1, f"more than one {kind} in a slot at a rank"
    assert max(max(record.versions) for record in records) == 1, "one version at a time"


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings_
def test_zero_sends_three_times_the_parameters_but_for_what_a_rank_has_itself(n, mode):
    _, messages = steady(program(mode, n, placement="zero"))
    p = n
    assert sum(sent_per_rank(messages).values()) == 3 * p * (n - 1)  # 3P each, less one N-th that stays on its rank
    for end in ("source", "destination"):
        lent = Counter((m.slot, getattr(m, end)) for m in messages if m.kind == "parameters")
        assert max(lent.values()) == 1, "one stage in and one out in a slot"


@given(n=sizes, mode=st.sampled_from(("dp", *CYCLIC)), data=st.data())
@settings_
def test_a_parameter_server_sends_two_copies_a_worker_and_gets_one_and_cdp_spreads_its_pulls(n, mode, data):
    p = data.draw(st.integers(1, n), label="servers")
    built = program(mode, n, placement="parameter_server", servers=p)
    records, messages = steady(built)
    sent = sent_per_rank(messages)
    stages = Counter(built.schedule.placement.holders(stage)[0] for stage in range(n))
    assert sent == {**dict.fromkeys(range(n), n), **{server: 2 * n * held for server, held in stages.items()}}
    assert sum(sent.values()) == 3 * n * n  # of stages of one byte: 3P for each worker, none stays where it is
    pulls = Counter((m.slot, m.source) for m in messages if m.kind == "parameters")
    assert max(pulls.values()) == (n if mode == "dp" else max(stages.values()))
    idle = [
        rank for rank in range(n + p) if not any(a.op.is_compute for r in records if r.rank == rank for a in r.actions)
    ]
    assert idle == [*range(n, n + p)]


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings_
def test_a_pipeline_device_holds_n_minus_j_stages_and_moves_micro_batches_only(n, mode):
    records, messages = steady(program(mode, n, placement="pipeline"), StageCosts.equal(n, 5, 1))
    for j in range(n):
        assert max(record.activation_peak_bytes for record in records if record.rank == j) == (n - j) * 5
        computes = [a for record in records if record.rank == j for a in record.actions if a.op.is_compute]
        assert len(computes) == 2 * n, "every slot is used: no bubble"
    assert {message.kind for message in messages} == {"activations", "input_gradients"}
    assert len(messages) == 2 * n * (n - 1)


@given(n=sizes, mode=st.sampled_from(CYCLIC))
@settings_
def test_a_model_parallel_device_holds_one_micro_batch(n, mode):
    records, _ = steady(program(mode, n, placement="model_parallel"))
    assert {record.activation_peak_bytes for record in records} <= {0, 1}


@pytest.mark.parametrize("placement", DISTRIBUTED)
@pytest.mark.parametrize("mode", CYCLIC)
def test_the_longest_chain_of_messages_does_not_grow_with_n(placement, mode):
    chains = [
        simulate(program(mode, n, placement=placement), StageCosts.equal(n), 5).max_chain_per_slot
        for n in (3, 4, 5, 8, 12)
    ]
    assert set(chains) == {2 if placement in ("zero", "parameter_server") and mode == "cdp_v2" else 1}


@pytest.mark.parametrize("n", [3, 4, 8])
def test_with_data_parallelism_it_grows(n):
    assert simulate(program("dp", n, placement="replicated"), StageCosts.equal(n), 3).max_chain_per_slot == 2 * (n - 1)


def test_the_two_messages_of_an_exchange_do_not_wait_for_each_other():
    assert simulate(program("dp", 2, placement="replicated"), StageCosts.equal(2), 3).max_chain_per_slot == 1


@pytest.mark.parametrize("flush", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_schedules_with_a_flush(n, flush):
    trace = simulate(program("dp", n, placement="pipeline", pipeline_schedule=flush), StageCosts.equal(n, 1, 1), 3)
    assert len({record.slot for record in trace.records}) == 3 * 2 * (2 * n - 1), "2(N+S-1) slots a step"
    for j in range(n):
        held = max(record.activation_peak_bytes for record in trace.records if record.rank == j)
        assert held == (n if flush == "gpipe" else n - j)


@pytest.mark.parametrize("flush", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize(
    ("m", "s", "d"), [(1, 6, 3), (2, 6, 6), (3, 6, 2), (5, 6, 3), (8, 4, 4), (4, 12, 4), (7, 3, 3)]
)
def test_idle_share_and_activations_of_any_number_of_micro_batches_and_ranks(m, s, d, flush):
    built = program("dp", m, s, "pipeline", ranks=d, pipeline_schedule=flush)
    trace = simulate(built, StageCosts.equal(s, 1, 1), 3)
    assert trace.idle_share(built.schedule.slots_per_step) == pytest.approx((d - 1) / (m + d - 1))
    for rank in range(d):
        held = max(record.activation_peak_bytes for record in trace.records if record.rank == rank)
        assert held == (m if flush == "gpipe" else min(m, d - rank)) * (s // d)
    if (m, s, d, flush) == (4, 12, 4, "one_f_one_b"):
        peaks = [max(r.activation_peak_bytes for r in trace.records if r.rank == rank) for rank in range(d)]
        assert sum(peaks) == 30


@pytest.mark.parametrize(("placement", "sent"), [("replicated", 2), ("zero", 3)])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_sent_in_a_step_are_those_of_the_steady_state(placement, sent, n):
    built = program("cdp_v2", n, placement=placement)
    trace = simulate(built, StageCosts.equal(n), 5)
    end = 3 * 2 * n  # as a run that traces 3 of its steps
    records, messages = (tuple(each for each in found if each.slot < end) for found in (trace.records, trace.messages))
    cut = Trace(Sizes(n, n), Lanes(n), records, messages, is_cut=True)
    assert cut.bytes_sent_per_device_per_step(built.schedule.slots_per_step) == sent * (n - 1)  # P = n stages of 1 byte


@pytest.mark.parametrize(("placement", "sent"), [("replicated", 2), ("zero", 3)])
@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (3, 3)])
def test_with_accumulation_replicated_relays_k_times_and_hands_totals_on_once(placement, sent, n, k):
    built = program("cdp_v1", n, placement=placement, accumulate=k)
    trace = simulate(built, StageCosts.equal(n), 5)
    length = built.schedule.slots_per_step
    messages = sum(m.bytes for m in trace.messages if 3 * length <= m.slot < 4 * length)
    per_stage = {"replicated": (n * k - 1) + (n - 1 if n > 2 else 1), "zero": 3 * (n - 1) * k}[placement]
    assert messages == n * per_stage


# ------------------------------------------------------------------------------------------- collectives


@given(n=st.integers(2, 5), c=st.integers(1, 2), r=st.integers(1, 2), data=st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_bytes_of_collectives_are_those_of_rings(n, c, r, data):
    """By all D ranks: 2P(D-1) for all-reduces, P(D-1) for two all-gathers and a reduce-scatter each."""
    found = data.draw(st.lists(st.integers(0, 50), min_size=n * c, max_size=n * c).map(tuple))
    costs = replace(StageCosts.equal(n * c), parameter_bytes=found, gradient_bytes=found)
    for placement, times in zip(COLLECTIVE_PLACEMENTS, (2, 3), strict=True):
        trace = simulate(program("dp", n, n * c, placement, collectives=True, replicas=r), costs, 4)
        assert sum(message.bytes for message in trace.messages) == 4 * times * sum(found) * (n * r - 1)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_chains_of_collectives_are_those_of_rings(n):
    costs = StageCosts.equal(n, 6, n)
    chains = [
        simulate(program("dp", n, placement=p, collectives=True), costs, 4).max_chain_per_slot
        for p in COLLECTIVE_PLACEMENTS
    ]
    assert chains == [2 * (n - 1), 2 * (n - 1)]  # zero: a reduce-scatter, then the all-gather of what it makes


@pytest.mark.parametrize("placement", COLLECTIVE_PLACEMENTS)
def test_rings_split_their_bytes_evenly_over_the_ranks(placement):
    trace = simulate(program("dp", 4, placement=placement, collectives=True), StageCosts.equal(4, 6, 10), 4)
    by_rank = [sum(m.bytes for m in trace.messages if m.source == rank) for rank in range(4)]
    assert sum(by_rank) == 4 * (2 if placement == "replicated" else 3) * 40 * 3
    assert max(by_rank) - min(by_rank) <= 4 * 4 * (2 if placement == "replicated" else 3)
    assert all(m.destination == (m.source + 1) % 4 for m in trace.messages)


# ------------------------------------------------------------------------------------------- parts


def test_messages_of_a_trace_are_parts_with_their_bytes():
    costs = replace(StageCosts.equal(6), parameter_bytes=RESNET, gradient_bytes=RESNET)
    trace = simulate(program("cdp_v2", 2, 6, "replicated", gradient_bytes=RESNET), costs, 2)
    assert sum(m.bytes for m in trace.messages) == 2 * 2 * sum(RESNET)
    assert {m.value.part for m in trace.messages if m.stage == 5} == {1, 2, 3, 4, 5}
    assert trace.max_chain_per_slot == 1


@pytest.mark.parametrize("seconds_of_link_over_compute", [0.8, 1.0, 1.2])
def test_a_step_over_a_slow_link_is_shorter_by_a_tenth_at_least(seconds_of_link_over_compute):
    costs = replace(StageCosts.equal(6), parameter_bytes=RESNET, gradient_bytes=RESNET)
    link = Link(0.0, sum(RESNET) / (18 * seconds_of_link_over_compute))
    cluster = replace(Cluster.equal(6, 1.0, 2.0), within_host=link, devices_per_host=2)
    plain, paced = (
        price(program("cdp_v2", 2, 6, "replicated", gradient_bytes=sizes_), costs, cluster).step_seconds
        for sizes_ in ((), RESNET)
    )
    assert paced < 0.9 * plain
