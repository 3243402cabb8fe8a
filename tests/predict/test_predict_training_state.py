"""What optimizer and delay method are said to keep is what a run keeps."""

from __future__ import annotations

import pytest

from cdp_repro.cli.plan import main
from cdp_repro.config.compose import compose_config
from cdp_repro.config.numerics import parameter_dtype
from cdp_repro.config.program_file import program_of
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing.quote import cluster_of, prices_on_each
from cdp_repro.predict.training_state import (
    copied_bytes,
    optimizer_states,
    predicted_parameter_bytes,
    training_state,
)
from cdp_repro.training.assembly import build_engine, load_data


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=cdp_v2", "delay=prediction"],
        ["mode=cdp_v1", "optim=adamw", "delay=error_feedback"],
        ["mode=cdp_v2", "optim=muon", "delay=error_feedback"],
        ["mode=cdp_v1", "optim=nadamw", "delay=compensation"],
        ["mode=dp", "optim.momentum=0"],
    ],
    ids=" ".join,
)
def test_the_bytes_are_those_of_a_run(tiny, overrides):
    config = compose_config([*tiny, *overrides])
    cut, dataset = cut_model(config), load_data(config)
    engine = build_engine(config, cut, dataset.train_size, program_of(config, cut.costs.gradient_bytes))
    batches = dataset.train_batches(
        range(3), batch_size=config.batch_size, parts=config.sample_parts, seed=0, device=config.torch_device,
        dtype=parameter_dtype(config),
    )  # fmt: skip
    for _ in engine.run(batches):
        pass
    schedule = config.schedule()
    expected = training_state(config, cut, schedule)
    assert (engine.optimizer_bytes, engine.delay_bytes) == (sum(expected.optimizer), sum(expected.delay))
    assert expected.most_on_a_rank(schedule) == (engine.optimizer_bytes, engine.delay_bytes)


def test_a_rank_counts_the_stages_that_it_holds(tiny):
    config = compose_config([*tiny, "mode=cdp_v2", "placement=pipeline", "delay=prediction"])
    state = training_state(config, cut_model(config), config.schedule())
    assert state.most_on_a_rank(config.schedule()) == (max(state.optimizer), max(state.delay))
    assert state.delay[-1] == 0, "the last stage is always fresh"


@pytest.mark.parametrize(
    ("overrides", "values"),
    [([], 1), (["optim.momentum=0"], 0), (["optim=adamw"], 2), (["optim=nadamw"], 2)],
)
def test_values_for_each_parameter(tiny, overrides, values):
    config = compose_config([*tiny, *overrides])
    assert optimizer_states(config, cut_model(config), config.schedule()) == [values] * config.stage_count


def test_muon_keeps_one_value_of_hidden_matrices_and_two_of_others(tiny):
    config = compose_config([*tiny, "optim=muon"])
    cut, found = cut_model(config), optimizer_states(config, cut_model(config), config.schedule())
    kept = [states * size for states, size in zip(found, cut.costs.parameter_bytes, strict=True)]
    assert kept == pytest.approx(training_state(config, cut, config.schedule()).optimizer)
    assert any(1 < states < 2 for states in found)


@pytest.mark.parametrize("others", [[], ["mode=cdp_v2", "delay=error_feedback"]])
def test_a_price_counts_what_the_plan_says(tiny, others):
    config = compose_config([*tiny, "optim=muon", *others, "price=true", "cluster.flops_per_second=1e9"])
    cut = cut_model(config)
    (prices,) = prices_on_each(config, cut, [cluster_of(config, cut)])
    beside = training_state(config, cut, config.schedule())
    parameters = sum(cut.costs.parameter_bytes)
    for each in ("dp single_device", "dp replicated", "dp ddp"):  # whatever the mode: it reads nothing stale
        assert prices[each].state_bytes == pytest.approx(parameters + sum(beside.optimizer)), each
    versions = prices[f"{config.mode.name} single_device"].state_bytes - sum(beside.optimizer) - sum(beside.delay)
    assert parameters <= versions <= 2 * parameters


def test_the_plan_counts_the_copies_that_stale_reads_see(tiny, capsys):
    overrides = [*tiny, "mode=cdp_v1", "delay=prediction"]
    config = compose_config(overrides)
    cut = cut_model(config)
    program = program_of(config, cut.costs.gradient_bytes)
    copies = predicted_parameter_bytes(config, cut, program)
    assert copies == copied_bytes(program, cut.trained_bytes) > sum(cut.trained_bytes), "two versions at a time"
    assert main(overrides) == 0
    *_, columns, parallel, chosen, _ = capsys.readouterr().out.splitlines()
    place = columns.index("copies for stale reads")
    assert chosen[place:].startswith(format_bytes(copies)) and parallel[place:].startswith("0 bytes")
    for without in ("delay=none", "delay=error_feedback", "mode=dp"):
        config = compose_config([*overrides, without])
        assert predicted_parameter_bytes(config, cut, program_of(config, cut.costs.gradient_bytes)) == 0


def test_the_price_counts_the_last_steps(capsys):
    ways = ["price=true", "cluster.flops_per_second=1e9", "model=mlp", "model.depth=1", "workers=2", "mode=cdp_v1"]
    shown = []
    for delay in ("none", "error_feedback"):
        assert main([*ways, f"delay={delay}"]) == 0
        shown.append(capsys.readouterr().out.splitlines())
    differing = [one.split()[:2] for one, other in zip(*shown, strict=True) if one != other]
    assert ["cdp_v1", "single_device"] in differing and ["dp", "single_device"] not in differing


def test_the_price_says_which_copies_it_leaves_out(capsys):
    ways = ["price=true", "cluster.flops_per_second=1e9", "model=mlp", "model.depth=1", "workers=2", "mode=cdp_v1"]
    for delay, leaves_out in {"prediction": True, "error_feedback": False, "none": False}.items():
        assert main([*ways, f"delay={delay}"]) == 0
        assert ("without the copies that stale reads see" in capsys.readouterr().out) == leaves_out
