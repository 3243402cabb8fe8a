"""Totals of slots, which keep no records, against the trace of the same slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate_slots, simulate_totals, version_bytes
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, PLACEMENTS, Program, Schedule
from cdp_repro.schedule.values import Kind, Value
from cdp_repro.trace import Trace

STEPS = 4


@st.composite
def jobs(draw):
    """Schedules of all placements, and costs of stages that are all different."""
    n, c, r, k = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    s = n * c
    matrix = [[1 + (2 * i + j) % 3 for j in range(s)] for i in range(n * k)]
    mode = draw(st.sampled_from(["dp", "cdp_v1", "cdp_v2", "accumulation", matrix]))
    placement = "single_device" if mode == "accumulation" else draw(st.sampled_from(sorted(PLACEMENTS)))
    order = draw(st.sampled_from(["paper", "backward_first"]))
    flush = draw(st.sampled_from(["gpipe", "one_f_one_b"]))
    collectives = mode == "dp" and placement in COLLECTIVE_PLACEMENTS and draw(st.booleans())
    schedule = Schedule.build(
        mode, n, s, placement, order, replicas=r, accumulate=k, pipeline_schedule=flush, collectives=collectives
    )
    sizes = st.lists(st.integers(0, 9), min_size=s, max_size=s).map(tuple)
    kept = draw(sizes)
    costs = replace(
        StageCosts.equal(s), forward_bytes=kept, backward_bytes=kept, parameter_bytes=draw(sizes),
        gradient_bytes=draw(sizes), output_bytes=draw(sizes), input_gradient_bytes=draw(sizes),
        buffer_bytes=draw(sizes), output_kept=(draw(st.booleans()),) * s, input_kept=(draw(st.booleans()),) * s,
    )  # fmt: skip
    return schedule, costs


@given(job=jobs(), drains=st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_totals_are_those_of_the_trace(job, drains):
    schedule, costs = job
    slots = [slot for slot in Program(schedule).slots(STEPS) if drains or slot.number < STEPS * schedule.slots_per_step]
    totals = list(simulate_totals(schedule, costs, slots))
    sums: list[set[Value]] = [set() for _ in range(schedule.ranks)]
    trace = simulate_slots(schedule, costs, slots)
    size = version_bytes(schedule, costs)
    assert {t.slot: t.activation_bytes for t in totals if t.slot in trace.activation_bytes_per_slot} == (
        trace.activation_bytes_per_slot
    )
    assert max(t.activation_bytes_per_device for t in totals) == trace.activation_peak_bytes_per_device
    assert max(t.versions_kept for t in totals) == trace.versions_kept
    messages = Counter(message.slot for message in trace.messages)
    assert {t.slot: t.messages for t in totals if t.messages} == messages
    for total in totals:
        here = [record for record in trace.records if record.slot == total.slot]
        most = 0
        for action in (action for record in here for action in record.actions):
            present = sums[action.rank]
            present |= {value for value in action.writes if value.kind == Kind.GRADIENTS}
            present.difference_update(action.frees)
            most = max(most, sum(map(costs.bytes_of, present)))
        assert total.gradient_bytes_per_device == most
        sent = tuple(message for message in trace.messages if message.slot == total.slot)
        if not here:
            continue
        held = [sum(n * size(r.rank, j) for j, n in enumerate(r.versions)) for r in here]
        assert total.parameter_bytes_per_device == max(held)
        assert total.activation_bytes_per_device == max(record.activation_peak_bytes for record in here)
        alone = Trace(schedule.sizes, schedule.timeline.lanes, tuple(here), sent)
        assert total.chain == alone.max_chain_per_slot
        assert total.bytes_sent == {
            rank: sum(message.bytes for message in sent if message.source == rank) for rank in {m.source for m in sent}
        }
        assert total.computing_ranks == sum(any(a.op.is_compute for a in record.actions) for record in here)


def test_optimizer_state_is_counted_once_a_parameter_and_shows_in_the_sum_alone():
    costs = replace(StageCosts.equal(3), parameter_bytes=(96, 48, 100))
    schedule = Schedule.build("cdp_v1", 3)
    without, once = (
        [*simulate_totals(schedule, costs, Program(schedule).slots(2), optimizer_states=beside)]
        for beside in ((), [1] * 3)
    )
    assert [total.bytes_per_device + 244 for total in without] == [total.bytes_per_device for total in once]
    assert [replace(total, bytes_per_device=0) for total in without] == [replace(t, bytes_per_device=0) for t in once]
    assert max(total.parameter_bytes_per_device for total in once) > 244, "several versions"


@pytest.mark.parametrize(
    ("mode", "placement", "collectives", "sums"),
    [
        ("dp", "single_device", False, 1),  # the backwards of a stage follow one another, then comes its update
        ("dp", "replicated", True, 4),  # each rank has the sums of its own micro-batches, and updates when all have
        ("cdp_v2", "single_device", False, 4),  # each stage is at another micro-batch, and waits for the last one
        ("cdp_v1", "pipeline", False, 1),
    ],
)
def test_sums_of_gradients_are_counted_where_they_wait(mode, placement, collectives, sums):
    """Of four equal stages with four workers."""
    schedule = Schedule.build(mode, 4, placement=placement, collectives=collectives)
    costs = replace(StageCosts.equal(4), gradient_bytes=(7,) * 4)
    totals = simulate_totals(schedule, costs, Program(schedule).slots(3))
    assert max(total.gradient_bytes_per_device for total in totals) == 7 * sums


def test_lent_parameters_count_until_the_compute_that_reads_them_ends():
    """In slot 1, rank 0 computes stage 1 forward with a copy, and has got the copy for the backward."""
    schedule = Schedule.build("dp", 2, placement="zero")
    costs = replace(StageCosts.equal(2), forward_bytes=(5, 5), backward_bytes=(5, 5), parameter_bytes=(1000, 1000))
    totals = [*simulate_totals(schedule, costs, Program(schedule).slots(1))]
    assert max(total.parameter_bytes_per_device for total in totals) == 1000
    assert [total.bytes_per_device for total in totals[:2]] == [2000 + 5, 3000 + 10]


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"3 stages but the costs are of 2"):
        list(simulate_totals(Schedule.build("dp", 3), StageCosts.equal(2), ()))
