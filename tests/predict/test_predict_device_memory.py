"""What a device needs memory for, against a count of its own; the engine's tensors are counted in its tests."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cdp_repro.cli.plan import main
from cdp_repro.config.compose import compose_config
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.forecast import make_plan
from cdp_repro.predict.simulate import Devices, simulate_totals
from cdp_repro.predict.training_state import copied_bytes, optimizer_states, training_state
from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.values import Kind

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


def test_a_sum_is_there_until_its_update_is_done_and_a_version_until_its_last_backward():
    """Stage 0 of a pipeline of two: two versions, momentum, the sum from which the second is made, a micro-batch."""
    schedule, costs = Schedule.build("cdp_v2", 2, placement="pipeline"), StageCosts.equal(2, 100, 1000)
    slots = Program(schedule).complete_run
    plain, clipped = (
        max(total.bytes_per_device for total in simulate_totals(schedule, costs, slots, [1, 1], clips=clips))
        for clips in (False, True)
    )
    assert plain == 2000 + 1000 + 1000 + 100
    assert clipped == plain + 1000, "a clipped copy of the sum, by the norm of the stage"


def test_a_version_is_there_beside_the_gradients_of_the_last_backward_that_reads_it():
    """On one device, cdp_v2: three versions, as many sums as stages, momentum, and two stages' activations."""
    schedule, costs = Schedule.build("cdp_v2", 2), StageCosts.equal(2, 100, 1000)
    totals = simulate_totals(schedule, costs, Program(schedule).complete_run, [1, 1])
    assert max(total.bytes_per_device for total in totals) == 3000 + 2000 + 2000 + 200


def test_clipping_by_the_norm_over_all_stages_keeps_all_sums_until_updates_are_read():
    _, plan = planned("mode=dp", "optim.clip_norm=1")
    _, without = planned("mode=dp")
    costs, memory = plan.cut.costs, plan.chosen.memory
    parameters = sum(costs.parameter_bytes)
    assert memory.gradients == parameters > without.chosen.memory.gradients
    # the update of stage 0 comes first, with a clipped copy of its sum, and all others still wait
    assert memory.together >= parameters + parameters + parameters + costs.gradient_bytes[0]


def test_a_clipped_copy_counts_where_the_sum_goes_on_to_the_next_rank():
    schedule = Schedule.build("cdp_v2", 3, placement="replicated", accumulate=2)
    sizes = (3000, 2000, 1000)
    costs = replace(StageCosts.equal(3, 100), parameter_bytes=sizes, gradient_bytes=sizes)
    most, copies = {}, 0
    for clips in (False, True):
        devices, most[clips] = Devices(schedule, costs, [1] * 3, clips), 0
        for action in (action for slot in Program(schedule).complete_run for action in slot.actions):
            devices.run(action)
            most[clips] = max(most[clips], devices.most_bytes(action))
            if action.op is Op.UPDATE and not clips:
                total = sum(costs.bytes_of(value) for value in action.reads if value.kind == Kind.GRADIENTS)
                copies = max(copies, devices.most_bytes(action) + total)
    assert most[True] == max(most[False], copies) > most[False]


def test_a_program_of_a_file_needs_what_it_needs_where_it_is_made(tmp_path):
    overrides = ["model=mlp", "model.depth=3", "workers=4", "mode=cdp_v2", "placement=replicated"]
    assert main([*overrides, f"--program={tmp_path}/program.txt"]) == 0
    made, read = (
        make_plan(compose_config([*overrides, *more], check_device=False)).chosen.memory
        for more in ((), (f"program={tmp_path}/program.txt",))
    )
    assert read == made


def test_what_a_run_needs_after_a_drain_counts():
    """Where workers keep their own copies, the versions that a drain leaves meet the sums of the next step."""
    config = compose_config(
        ["model=mlp", "model.depth=3", "workers=4", "mode=cdp_v2", "placement=replicated"], check_device=False
    )
    plan = make_plan(config)
    program, cut = plan.chosen.program, plan.cut
    beside = optimizer_states(config, cut, program.schedule)
    first = simulate_totals(program.schedule, cut.costs, program.complete_run, beside)
    assert plan.chosen.memory.together > max(total.bytes_per_device for total in first)


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
