"""Names, seeds, sizes and refusals of `build_model`."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

from cdp_repro.models import BUILTIN_MODELS, ModelError, ModelSpec, build_model, registry
from cdp_repro.schedule import by_name

SMALL = [("mlp", (1, 8, 8)), ("resnet8", (1, 8, 8)), ("test_vit", (3, 32, 32)), ("test_efficientnet", (3, 32, 32))]


def test_builtin_names():
    assert BUILTIN_MODELS == ("mlp", "gpt", "resnet8", "resnet20", "resnet18", "resnet50", "vit_b_16", "two_towers")


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "parameters"),
    [
        ("resnet8", (3, 32, 32), 10, 78_042),
        ("resnet20", (3, 32, 32), 10, 272_474),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("vit_b_16", (3, 224, 224), 1000, 86_567_656),
        ("mlp", (1, 8, 8), 10, 64 * 64 + 64 + 5 * (64 * 64 + 64) + 64 * 10 + 10),
    ],
)
def test_parameter_counts(name, input_shape, classes, parameters):
    with torch.device("meta"):
        model = build_model(name, ModelSpec(input_shape=input_shape, classes=classes))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("mlp", 7), ("resnet8", 5), ("resnet20", 11), ("resnet18", 10), ("resnet50", 18), ("vit_b_16", 14)],
)
def test_blocks_are_named_and_counted(name, blocks):
    with torch.device("meta"):
        model = build_model(name, ModelSpec(input_shape=(3, 224, 224), classes=10))
    assert isinstance(model, nn.Sequential)
    names = [key for key, _ in model.named_children()]
    assert len(names) == blocks
    assert names[0] in ("stem", "embed", "hidden0")
    assert names[-1] == "head"


@pytest.mark.parametrize(("name", "input_shape"), SMALL)
def test_weights_depend_on_the_seed_alone(name, input_shape):
    first = build_model(name, ModelSpec(input_shape=input_shape, classes=10), seed=3).state_dict()
    torch.randn(17)
    again = build_model(name, ModelSpec(input_shape=input_shape, classes=10), seed=3).state_dict()
    other = build_model(name, ModelSpec(input_shape=input_shape, classes=10), seed=4).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("name", "input_shape"), SMALL)
def test_global_generators_are_left_alone(name, input_shape):
    before = torch.get_rng_state(), random.getstate()
    build_model(name, ModelSpec(input_shape=input_shape, classes=10), seed=3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize(("name", "input_shape"), SMALL)
def test_models_come_in_training_mode(name, input_shape):
    model = build_model(name, ModelSpec(input_shape=input_shape, classes=10))
    assert all(module.training for module in model.modules())
    assert model(torch.zeros(2, *input_shape)).shape == (2, 10)


def test_mlp_sizes_and_dropout():
    model = build_model("mlp", ModelSpec(input_shape=(1, 4, 4), classes=3, hidden=5, depth=2, dropout=0.25))
    kinds = [[type(module).__name__ for module in block.modules()][1:] for block in model]
    assert kinds == [["Flatten", "Linear", "ReLU", "Dropout"], ["Linear", "ReLU", "Dropout"], []]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [(linear.in_features, linear.out_features) for linear in linears] == [(16, 5), (5, 5), (5, 3)]
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "nearest"), [("resnet81", "resnet8"), ("ResNet-18", "resnet18"), ("vit_b16", "vit_b_16"), ("mpl", "mlp")]
)
def test_unknown_names_get_the_nearest_ones(name, nearest):
    with pytest.raises(
        ModelError, match=rf"unknown model '{name}'; nearest names: .*\b{nearest}\b.*; built-in models: mlp"
    ):
        build_model(name, ModelSpec(input_shape=(3, 32, 32), classes=10))


def test_hopeless_names_get_the_built_in_ones():
    with pytest.raises(ModelError, match=r"unknown model '\?\?'; built-in models: mlp, gpt, resnet8"):
        build_model("??", ModelSpec(input_shape=(3, 32, 32), classes=10))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_shape": (0, 8, 8)}, r"input_shape=\(0, 8, 8\)"),
        ({"input_shape": (8, 8)}, r"input_shape=\(8, 8\)"),
        ({"classes": 0}, "classes=0 is too small: use at least 1"),
        ({"hidden": 0}, "hidden=0"),
        ({"depth": 0}, "depth=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
    ],
)
def test_sizes_out_of_range(wrong, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec(**{"input_shape": (1, 8, 8), "classes": 10} | wrong)


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_dropout_without_effect_is_refused(name):
    with pytest.raises(ModelError, match=rf"dropout=0.1 has no effect on {name}.*use dropout=0"):
        build_model(name, ModelSpec(input_shape=(1, 8, 8), classes=10, dropout=0.1))


def _fails(spec):
    raise RuntimeError(f"no weights for {spec.classes} classes")


def _repeats(spec):
    block = nn.Linear(8, 8)
    return nn.Sequential(nn.Flatten(), block, block)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_fails, "model mine cannot be built: RuntimeError: no weights for 10 classes"),
        (_repeats, "model mine has one block at several places: give each place a module of its own"),
        (lambda spec: [nn.Flatten()], "model mine is a list: give an nn.Sequential"),
        (
            lambda spec: nn.Sequential(nn.Flatten(), nn.LazyLinear(spec.classes)),
            "model mine does not know the shape of 1.weight yet: run a batch of its shape through it",
        ),
    ],
)
def test_a_model_of_an_installed_package_that_cannot_be_used_is_refused(monkeypatch, build, message):
    monkeypatch.setitem(registry._BUILDERS, "mine", build)
    with pytest.raises(ModelError, match=message):
        build_model("mine", ModelSpec((1, 8, 8), 10))


def test_a_model_of_an_installed_package_comes_in_training_mode_and_depends_on_the_seed_alone(monkeypatch):
    def build(_):
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        with torch.no_grad():
            model[0].weight.copy_(torch.from_numpy(numpy.random.rand(2, 2)))
            model[0].bias.fill_(random.random())
        return model.eval()

    monkeypatch.setitem(registry._BUILDERS, "mine", build)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    one, same, other = (build_model("mine", ModelSpec((1, 4, 4), 2), seed) for seed in (1, 1, 2))
    assert one.training and one[1].training
    for name, tensor in one.named_parameters():
        assert torch.equal(tensor, same.get_parameter(name)) and not torch.equal(tensor, other.get_parameter(name))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_each_tensor_has_a_name_of_its_own_in_the_original(name):
    spec = ModelSpec((16,), 7) if name == "gpt" else ModelSpec((3, 32, 32), 7)
    with torch.device("meta"):
        tensors = build_model(name, spec).state_dict()
    assert len(registry.original_tensors(name, tensors)) == len(tensors)


def test_a_model_that_joins_ours_keeps_its_names(monkeypatch):
    monkeypatch.setattr(registry, "BUILTIN_MODELS", (*BUILTIN_MODELS, "tiny"))
    names = ("embed.1.weight", "mid_1.1.bias", "head.1.weight")
    assert [registry.original_name("tiny", name) for name in names] == [*names]


def test_a_model_of_an_installed_package_does_not_hide_behind_one_of_ours(monkeypatch):
    entered = ("models", "resnet8")
    monkeypatch.setattr(by_name, "_entries", lambda group, name: [name] if (group, name) == entered else [])
    with pytest.raises(ModelError, match="an installed package has entered a model resnet8, as one of ours is called"):
        build_model("resnet8", ModelSpec((1, 8, 8), 10))
    assert build_model("mlp", ModelSpec((1, 8, 8), 10))
