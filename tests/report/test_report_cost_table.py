"""The cost table: formulas and simulation agree for stages of any sizes, and a disagreement shows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.closed_forms import closed_form
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate_slots
from cdp_repro.predict.steady_state import simulated, unit_costs
from cdp_repro.report.cost_table import (
    SIMULATED,
    Line,
    agreement_table,
    cost_table,
    large_lines,
    simulation_key,
    simulations_of,
)
from cdp_repro.schedule import Program
from cdp_repro.schedule.parts import part_of
from cdp_repro.studies.cost_settings import SETTINGS

STEPS = 4
"""After so many training steps every timeline repeats itself."""
RESULTS = Path(__file__).resolve().parents[2] / "results"
OURS = [setting for setting in SETTINGS if setting.baseline is None]


@st.composite
def stage_costs(draw):
    """Costs of 2 to 6 stages of which every backward needs input and output, as of layers with an activation."""
    n = draw(st.integers(2, 6))
    sizes = st.lists(st.integers(n, 99), min_size=n, max_size=n).map(tuple)  # so that a part of each is something
    kept, parameters, outputs = draw(sizes), draw(sizes), draw(sizes)
    return replace(
        StageCosts.equal(n),
        forward_bytes=kept,
        backward_bytes=kept,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        output_bytes=(*outputs[1:], 0),
        input_gradient_bytes=(0, *outputs[1:]),
        output_kept=(True,) * n,
        input_kept=(draw(st.booleans()),) * n,
    )


@pytest.mark.parametrize("setting", OURS, ids=simulation_key)
@given(costs=stage_costs(), states=st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_every_closed_form_is_what_simulation_gives(setting, costs, states):
    closed = closed_form(setting, costs.stages, costs, states)
    found = simulated(setting, costs.stages, costs, states)
    assert {k: v for k, v in found.items() if k in closed} == pytest.approx(closed)
    assert set(found) - set(closed) <= {"messages_per_slot", "most_sent_bytes"}, (
        "these depend on the sizes, or have no formula"
    )


@pytest.mark.parametrize("setting", OURS, ids=simulation_key)
def test_closed_forms_hold_of_stages_whose_outputs_only_the_next_needs(setting):
    """Of Linear, Tanh, Linear: the last layer keeps its input. What then depends on the sizes has no form."""
    sizes = {"forward_bytes": (90, 120, 70, 40), "backward_bytes": (70, 120, 70, 60), "output_bytes": (20, 20, 20, 0)}
    kept = replace(StageCosts.equal(4, 20, 100), **sizes)
    costs = replace(kept, output_kept=(False, False, False, True), input_kept=(True,) * 4)
    closed, found = (get(setting, 4, costs, 1) for get in (closed_form, simulated))
    assert {k: v for k, v in found.items() if k in closed} == pytest.approx(closed)
    assert "versions_kept" in closed


@pytest.mark.parametrize("setting", OURS, ids=simulation_key)
def test_closed_forms_hold_where_gradients_leave_in_parts(setting):
    sizes = (2**20, 40 * 2**20)
    costs = replace(StageCosts.equal(2, 100), parameter_bytes=sizes, gradient_bytes=sizes)
    closed, found = (get(setting, 2, costs, 1) for get in (closed_form, simulated))
    assert {k: v for k, v in found.items() if k in closed} == pytest.approx(closed)


@pytest.mark.parametrize("setting", OURS, ids=simulation_key)
@given(costs=stage_costs(), states=st.integers(0, 2))
@settings(max_examples=6, deadline=None)
def test_simulation_without_records_gives_what_a_trace_gives(setting, costs, states):
    schedule = setting.schedule(costs.stages)
    step, sizes, placement = schedule.slots_per_step, costs.parameter_bytes, schedule.placement
    slots = takewhile(lambda slot: slot.number < STEPS * step, Program(schedule).endless())
    trace = simulate_slots(schedule, costs, slots)

    def share(rank, size):
        return len(part_of(size, rank + 1, schedule.ranks)) if placement.is_sharded else size

    own = [
        sum(share(k, size) for j, size in enumerate(sizes) if k in placement.holders(j)) for k in range(schedule.ranks)
    ]
    assert simulated(setting, costs.stages, costs, states) == {
        "devices": schedule.ranks,
        "activation_bytes_per_device": trace.activation_peak_bytes_per_device,
        "activation_bytes_total": trace.activation_peak_bytes_total,
        "parameter_bytes_per_device": max(
            sum(n * share(record.rank, size) for n, size in zip(record.versions, sizes, strict=True))
            for record in trace.records
        ),
        "optimizer_bytes_per_device": states * max(own),
        "versions_kept": trace.versions_kept,
        "sent_bytes_per_device": trace.bytes_sent_per_device_per_step(step),
        "most_sent_bytes": max(trace.bytes_sent_by_rank(step).values(), default=0),
        "messages_per_slot": trace.max_messages_per_slot,
        "chain": trace.max_chain_per_slot,
        "idle_share": trace.idle_share(step),
    }


@pytest.mark.parametrize("n", [2, 5, 8])
def test_equal_stages_give_the_formulas_of_the_design(n):
    by_key = {simulation_key(s): closed_form(s, n, StageCosts.equal(n, 100, 10), 1) for s in OURS}
    whole, p = 100 * n, 10 * n
    assert by_key["single device, dp"]["activation_bytes_total"] == n * whole
    assert by_key["single device, cdp_v1"]["activation_bytes_total"] == (n + 1) / 2 * whole
    assert by_key["single device, gradient accumulation, accumulation"]["activation_bytes_total"] == whole
    assert by_key["model parallel, dp"]["devices"] == n * n
    assert by_key["model parallel, cdp_v2"]["devices"] == n * (n + 1) / 2
    assert by_key["replicated, cdp_v2"]["sent_bytes_per_device"] == pytest.approx(2 * p * (n - 1) / n)
    assert by_key["ZeRO, cdp_v1"]["sent_bytes_per_device"] == pytest.approx(3 * p * (n - 1) / n)
    assert by_key["replicated, cdp_v2"]["chain"] == 1
    assert by_key["replicated, dp"]["chain"] == (2 * (n - 1) if n > 2 else 1)
    assert by_key["pipeline, cdp_v2"]["idle_share"] == 0


def test_a_disagreement_is_shown_with_all_numbers():
    line = Line(OURS[0], 4, {"devices": 1, "chain": 2}, {"devices": 1, "chain": 2}, {"devices": 1, "chain": 3})
    assert line.disagreements() == ["chain"]
    assert line.text("devices") == "1"
    assert line.text("chain") == "c 2; s 2; e 3"
    assert line.text("versions_kept") == "–"
    assert replace(line, closed={}).text("devices") == "1 (s, e)"
    rows = agreement_table([line]).rows
    assert [row[-1] for row in rows] == ["yes", "no"]
    alone = replace(line, closed={}, simulated={})
    assert [row[-1] for row in agreement_table([alone]).rows] == ["", ""], "with one source nothing agrees"
    assert len(cost_table([line], 4, [], []).rows) == 1 and not cost_table([line], 3, [], []).rows


def test_formulas_and_simulation_agree_with_equal_stages():
    values = {"8": {simulation_key(s): simulated(s, 8, unit_costs(8), 1) for s in OURS}}
    assert not any(line.disagreements() for line in large_lines(values))


@pytest.mark.parametrize("workers", [8, 16])
def test_stored_simulations_are_what_simulation_gives_today(workers):
    parts = json.loads((RESULTS / SIMULATED).read_text())["parts"]
    for setting in OURS:
        stored = simulations_of(parts)[str(workers)][simulation_key(setting)]
        now = simulated(setting, workers, unit_costs(workers), 1)
        assert stored == pytest.approx({quantity: now[quantity] for quantity in stored}), setting
