"""Optimizers by name: settings that arrive, and Muon against its definition on filters and matrices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdp_repro import Engine
from cdp_repro.config.schema import OptimConfig
from cdp_repro.models import ModelSpec, build_model, cut
from cdp_repro.models.chain import hidden_matrices
from cdp_repro.training.optim import learning_rate_factor, optimizer_factory

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import reference

HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("schedule", "warmup_epochs", "factors"),
    [
        ("constant", 0.0, [1] * 8),
        ("constant", 1.5, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("constant", 1.25, [0.4, 0.8, 1, 1, 1, 1, 1, 1]),
        ("step", 0.0, [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
        ("step", 0.5, [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
        ("step", 3.0, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.1, 0.1]),  # full before it falls
        ("cosine", 2.0, [0.25, 0.5, 0.75, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        ("cosine", 4.0, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1]),
    ],
)
def test_the_learning_rate_of_each_step(schedule, warmup_epochs, factors):
    """Four epochs of two steps."""
    config = OptimConfig(schedule=schedule, warmup_epochs=warmup_epochs, step_epochs=2, gamma=0.1)
    factor = learning_rate_factor(config, steps_per_epoch=2, epochs=4)
    assert [factor(step) for step in range(8)] == pytest.approx(factors)


STEPS, ROWS = 6, 8
RANGES = [range(2), range(2, 3), range(3, 4), range(4, 5)]


def make_stages(channels_last=False):
    model = build_model("resnet8", ModelSpec(input_shape=(2, 6, 6), classes=3), seed=0).double()
    return cut(model.to(memory_format=torch.channels_last) if channels_last else model, RANGES)


def make_batches():
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 2, 6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (ROWS,), generator=draw))
        for _ in range(STEPS)
    ]


def engine_with(config, stages, **choices):
    return Engine(stages, F.cross_entropy, optimizer_factory(config, stages), "cdp_v2", **choices)


def test_gains_and_biases_with_dimensions_of_one_value_are_no_matrices():
    """ResMLP's are [1, 1, C]."""
    model = build_model("resmlp_12_224", ModelSpec(input_shape=(3, 32, 32), classes=10))
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = {names[parameter] for parameter in hidden_matrices([model])}
    assert "blocks_0.linear_tokens.weight" in hidden
    assert not [name for name in hidden if name.endswith(("alpha", "beta", "bias"))]


MUON = OptimConfig(name="muon", lr=0.01, momentum=0.9, beta1=0.8, beta2=0.9, weight_decay=0.1)


def muon_reference(stages):
    model = nn.Sequential(*stages)
    inside = hidden_matrices(stages)
    hidden = {name for name, parameter in model.named_parameters() if parameter in inside}
    return reference.Muon(0.01, 0.9, 0.1, hidden, reference.AdamW(0.01, (0.8, 0.9), 1e-8, 0.1)), hidden


@pytest.mark.parametrize("channels_last", [False, True])
def test_muon_agrees_with_its_definition(channels_last):
    naive, hidden = muon_reference(make_stages())
    expected = reference.train(make_stages(), F.cross_entropy, naive, "cdp_v2", 4, make_batches())
    engine = engine_with(MUON, make_stages(channels_last))
    for _ in engine.run(make_batches()):
        pass
    # bfloat16 inside: a last bit of a gradient may turn a value by its step
    found = dict(engine.model().named_parameters())
    assert found.keys() == expected.thetas[-1].keys()
    for name, theta in found.items():
        moved = (expected.thetas[-1][name] - expected.thetas[0][name]).norm()
        assert (theta - expected.thetas[-1][name]).norm() <= (0.02 if name in hidden else 1e-3) * moved, name


def test_filters_inside_are_muons_and_all_else_is_adamws():
    stages = make_stages()
    _, hidden = muon_reference(stages)
    assert hidden == {
        name
        for name, parameter in nn.Sequential(*stages).named_parameters()
        if ".layer" in name and parameter.ndim == 4
    }
    engine = engine_with(MUON, stages)
    for _ in engine.run(make_batches()[:1]):
        pass
    state = engine.state_dict()["stages"][1]["optimizer"]["state"]
    shapes = {tuple(entry["momentum_buffer"].shape) for entry in state["state"].values() if "momentum_buffer" in entry}
    assert (32, 16, 3, 3) in shapes, "with the shape of the filter"
    trained = [p for stage in stages for p in stage.parameters()]
    inside = sum(p.nbytes for p in hidden_matrices(stages))
    assert engine.optimizer_bytes == inside + 2 * (sum(p.nbytes for p in trained) - inside)


def test_muon_goes_on_bitwise_after_a_resume():
    whole, first, second = (engine_with(MUON, make_stages()) for _ in range(3))
    expected = [result.losses for result in whole.run(make_batches())]
    begun = [result.losses for result in first.run(make_batches()[:3])]
    second.load_state_dict(first.state_dict())
    assert begun + [result.losses for result in second.run(make_batches()[3:])] == expected


def test_settings_arrive_at_torchs_optimizers():
    weight = [nn.Parameter(torch.zeros(2, 2))]
    stages = [nn.Sequential(nn.Linear(1, 1))]
    sgd = optimizer_factory(OptimConfig(name="sgd", lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.1), stages)(
        weight
    )
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.8
    assert (sgd.defaults["lr"], sgd.defaults["weight_decay"]) == (0.3, 0.1)
    nadamw = optimizer_factory(OptimConfig(name="nadamw", beta1=0.99, weight_decay=0.2), stages)(weight)
    assert isinstance(nadamw, torch.optim.NAdam) and nadamw.defaults["decoupled_weight_decay"]
    assert nadamw.defaults["betas"] == (0.99, 0.999) and nadamw.defaults["weight_decay"] == 0.2
    adamw = optimizer_factory(OptimConfig(name="adamw", beta1=0.8, beta2=0.9, weight_decay=0.3), stages)(weight)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.9) and adamw.defaults["weight_decay"] == 0.3
