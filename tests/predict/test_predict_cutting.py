"""Cuts measured without weights: the numbers of a model that has them, and models that no machine here could hold."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn

from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.models import ModelError, registry
from cdp_repro.predict.cutting import cut_model, measure_cut
from cdp_repro.predict.stage_cut import StageCut

MODELS = (
    ("model=mlp", "precision=fp64"),
    ("model=resnet8", "precision=bf16", "channels_last=true"),
    ("model=resnet8", "partition=parameters"),
    ("model=gpt", "dataset=text", "optim=muon", "model.depth=2"),
    ("model=gpt", "dataset=text", "model.depth=2", "mode=terapipe"),
    ("model=two_towers", "mode=one_f_one_b", "placement=pipeline", "workers=3", "batch_size=63"),
    ("model=vit_tiny_patch16_224", "dataset=synthetic", "dataset.image_size=32", "partition=activations"),
)


@pytest.fixture
def built_on(monkeypatch):
    """The device on which each model was built."""
    found = []

    def noted(name, *arguments):
        found.append(torch.get_default_device().type)
        return build(name, *arguments)

    build = registry.build_model
    monkeypatch.setattr("cdp_repro.predict.cutting.build_model", noted)
    return found


@pytest.mark.parametrize("given", MODELS, ids=" ".join)
def test_a_cut_without_weights_has_the_same_numbers(given, built_on):
    config = compose_config([*given])
    without, real = measure_cut(config), cut_model(config)
    assert built_on == ["meta", "cpu"]
    for field in fields(StageCut):
        assert getattr(without, field.name) == getattr(real, field.name), field.name
    assert all(tensor.device.type == "cpu" for stage in real.stages for tensor in stage.state_dict().values())


def test_a_model_larger_than_any_memory_is_cut():
    sizes = ("model.width=65536", "model.heads=64", "model.depth=4", "model.context=128", "batch_size=4")
    found = measure_cut(compose_config(["dataset=text", "model=gpt", "optim=muon", *sizes]))
    assert sum(found.costs.parameter_bytes) > 800e9 and len(found.block_names) == 4
    assert found.costs.forward_flops[1] == 2 * 128 * (12 * 65536**2 + 2 * 128 * 65536)


def test_measured_seconds_need_weights(built_on):
    found = measure_cut(compose_config(["model=mlp", "partition=time", "workers=2"]))
    assert built_on == ["cpu"] and min(found.balanced) > 0


class Reads(nn.Module):
    """Scales its input by a number that it reads from it."""

    def forward(self, inputs):
        return inputs * inputs.sum().item()


class First(nn.Module):
    def forward(self, inputs):
        return inputs[:, 0]


def _tied(spec):
    blocks = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, spec.classes)]
    blocks[3].weight = blocks[1].weight
    return nn.Sequential(*blocks)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda _: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
            r"gives \[32, 3\] for 32 .* must give \[32, 10\]",
        ),
        (lambda _: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), First()), r"it gives \[32\] for 32 samples"),
        (
            lambda _: nn.Sequential(nn.Flatten(), Reads()),
            r"part 1 of 2 \(Reads\) reads a value of a tensor",
        ),
        (_tied, "model=mine cannot be cut: stages 0 and 1 share the parameter 3.weight"),
    ],
)
def test_a_model_that_cannot_train_is_refused_before_it_does(mine, build, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        measure_cut(mine(build))


class Turns(nn.Module):
    """Multiplies the values, as complex numbers, with parameters and with a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.polar(torch.ones(32), torch.arange(32.0)))
        self.register_buffer("angles", torch.polar(torch.ones(32), torch.arange(32.0)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        values = torch.view_as_complex(x.flatten(1).view(len(x), 32, 2))
        return torch.view_as_real(values * self.weight * self.angles).flatten(1)


@pytest.mark.parametrize(
    ("precision", "kinds"),
    [("fp32", (torch.complex64, torch.float32)), ("fp64", (torch.complex128, torch.float64))],
)
def test_complex_numbers_stay_complex(mine, precision, kinds):
    config = mine(lambda spec: nn.Sequential(Turns(), nn.Linear(64, spec.classes)))
    config.precision = precision
    first, second = cut_model(config).stages
    assert (first[0].weight.dtype, second[0].weight.dtype) == kinds
    assert (first[0].angles.dtype, first[0].count.dtype) == (kinds[0], torch.int64)
    assert torch.allclose(first[0].angles.angle().float(), Turns().angles.angle(), atol=1e-5)


def test_the_code_of_an_installed_package_may_need_weights(built_on, mine):
    """It may compute with values while it builds a model, which the meta device has none of."""

    def build(spec):
        widths = torch.linspace(4, 8, 2).int().tolist()
        return nn.Sequential(nn.Flatten(), nn.Linear(64, widths[0]), nn.Linear(widths[0], spec.classes))

    assert measure_cut(mine(build)).blocks_per_stage == [2, 1] and built_on == ["cpu"]
