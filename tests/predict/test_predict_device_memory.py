"""What a device needs memory for, against a count of its own; the engine's tensors are counted in its tests."""

from __future__ import annotations

import re

import pytest

from cdp_repro.cli.plan import main
from cdp_repro.config.compose import compose_config
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.forecast import make_plan
from cdp_repro.predict.training_state import copied_bytes, training_state

SMALL = ("model=mlp", "model.depth=3", "workers=2", "stages=4", "batch_size=16")


def planned(*overrides):
    config = compose_config([*SMALL, *overrides], check_device=False)
    return config, make_plan(config)


def test_data_parallelism_on_one_device_is_a_forward_of_all_then_backwards_and_updates_by_stage():
    config, plan = planned("mode=dp", "optim=adamw")
    costs, memory = cut_model(config).costs, plan.chosen.memory
    parameters, alive = sum(costs.parameter_bytes), 2 * costs.activation_bytes
    assert (memory.activations, memory.parameters) == (alive, parameters)
    assert (memory.gradients, memory.optimizer) == (max(costs.gradient_bytes), 2 * parameters)
    assert (memory.delay, memory.copies) == (0, 0)
    most = alive
    for stage in reversed(range(costs.stages)):
        for _ in range(2):
            alive -= costs.backward_bytes[stage]
            most = max(most, alive + costs.gradient_bytes[stage])
    assert memory.together == most + 3 * parameters


@pytest.mark.parametrize("placement", ["single_device", "replicated", "zero", "pipeline", "parameter_server"])
@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2"])
def test_all_at_one_time_is_between_what_never_goes_and_the_sum_of_the_peaks(mode, placement):
    _, plan = planned(f"mode={mode}", f"placement={placement}", "optim=adamw")
    memory, lent = plan.chosen.memory, sum(plan.cut.costs.parameter_bytes) * (placement in ("zero", "parameter_server"))
    peaks = memory.activations + memory.parameters + memory.gradients + memory.optimizer
    assert max(memory.activations, memory.parameters, memory.gradients) < memory.together <= peaks + lent


def test_methods_against_delay_count():
    config, plan = planned("mode=cdp_v1", "delay=prediction", "placement=replicated")
    _, without = planned("mode=cdp_v1", "placement=replicated")
    state = training_state(config, plan.cut, plan.chosen.program.schedule)
    copies = copied_bytes(plan.chosen.program, plan.cut.trained_bytes)
    assert (plan.chosen.memory.delay, plan.chosen.memory.copies) == (sum(state.delay), copies) > (0, 0)
    assert plan.chosen.memory.together == without.chosen.memory.together + sum(state.delay) + copies


def test_the_plan_shows_it_for_each_that_it_compares(capsys):
    assert main([*SMALL, "mode=cdp_v1", "optim=adamw", "delay=error_feedback"]) == 0
    _, table = capsys.readouterr().out.split(
        "a device needs at most (not counted: mini-batches, messages on their way)\n\n"
    )
    columns, *rows = (re.split(r"  +", line) for line in table.splitlines())
    assert columns == ["mode", "slot order", "activations", "parameters", "gradients", "optim=adamw",
                       "delay=error_feedback", "copies for stale reads", "together"]  # fmt: skip
    assert [row[:2] for row in rows] == [["dp", "paper"], ["cdp_v1", "paper"], ["cdp_v1", "backward_first"]]
    memory = planned("mode=cdp_v1", "optim=adamw", "delay=error_feedback")[1].chosen.memory
    assert rows[1][2:] == [*map(format_bytes, vars(memory).values())]
    assert rows[0][6:8] == ["0 bytes"] * 2 and rows[1][6] != "0 bytes"
