"""The rule of this package: a model cut into stages computes exactly what the uncut one computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from cdp_repro.models import ModelError, ModelSpec, build_model, cut
from cdp_repro.predict.partition import partition

MODELS = [
    ("mlp", (1, 4, 4), 0.2),
    ("resnet8", (1, 8, 8), 0.0),
    ("resnet20", (3, 8, 8), 0.0),
    ("resnet18", (3, 8, 8), 0.0),
    ("resnet50", (1, 8, 8), 0.0),
    ("vit_b_16", (3, 32, 32), 0.0),
    ("test_vit", (3, 32, 32), 0.2),  # ViT
    ("test_efficientnet", (3, 32, 32), 0.2),  # EfficientNet
    ("mobilenetv3_small_050", (3, 64, 64), 0.2),  # MobileNetV3
    ("mixer_s32_224", (3, 64, 64), 0.2),  # Mixer
]


def shaken(model):
    """Shift every parameter: a model that starts with zeros (heads, gains) has zero gradients, which hide errors."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.02)
    return model


def batch(input_shape, dtype):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, *input_shape, generator=generator, dtype=dtype)
    return images, torch.randint(10, (3,), generator=generator)


def train_whole(model, images, targets):
    output = model(images)
    loss = F.cross_entropy(output, targets)
    loss.backward()
    return output, loss


def train_in_stages(stages, images, targets):
    """Forward and backward of one stage at a time, cut apart at the boundaries, as the engine runs them.

    Boundary gradients come from `torch.autograd.grad`: `.grad` would copy them into the memory layout of the boundary
    tensor, and another layout makes other kernels add in another order (seen with Mixer).
    """
    inputs, outputs, x = [], [], images
    for stage in stages:
        x = x.detach().requires_grad_(x is not images)
        inputs.append(x)
        x = stage(x)
        outputs.append(x)
    loss = F.cross_entropy(outputs[-1], targets)
    output, grad_output = loss, None
    for j in reversed(range(len(stages))):
        parameters = list(stages[j].parameters())
        wanted = parameters if j == 0 else [*parameters, inputs[j]]
        gradients = torch.autograd.grad(output, wanted, grad_output)
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = gradient
        output, grad_output = outputs[j - 1], gradients[-1]
    return outputs[-1], loss


def cuts_of(blocks):
    """Every block alone, one stage, a lopsided cut and an even one."""
    return {
        "blocks": partition([1] * blocks, blocks),
        "one": partition([1] * blocks, 1),
        "lopsided": [range(1), range(1, blocks - 1), range(blocks - 1, blocks)],
        "even": partition([1] * blocks, 4),
    }


@pytest.mark.parametrize(("name", "input_shape", "dropout"), MODELS, ids=[name for name, *_ in MODELS])
def test_cut_model_equals_uncut_bitwise(name, input_shape, dropout):
    # Float32 for the one large model: its weights alone would be 700 MB in float64.
    dtype = torch.float32 if name == "vit_b_16" else torch.float64
    model = shaken(build_model(name, ModelSpec(input_shape=input_shape, classes=10, dropout=dropout)).to(dtype))
    images, targets = batch(input_shape, dtype)
    initial = copy.deepcopy(model.state_dict())
    cuts = cuts_of(len(model))
    if name == "vit_b_16":
        cuts = {"even": cuts["even"]}

    def run(train, modules):
        model.load_state_dict(initial)
        model.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            output, loss = train(modules, images, targets)
        gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        return output.detach(), loss.detach(), gradients, buffers

    output, loss, gradients, buffers = run(train_whole, model)
    assert loss.isfinite()
    unused = [key for key, gradient in gradients.items() if not gradient.any()]
    assert not unused, f"these gradients are zero and prove nothing: {unused}"
    for label, ranges in cuts.items():
        cut_output, cut_loss, cut_gradients, cut_buffers = run(train_in_stages, cut(model, ranges))
        assert torch.equal(output, cut_output), label
        assert torch.equal(loss, cut_loss), label
        assert [key for key in gradients if not torch.equal(gradients[key], cut_gradients[key])] == [], label
        assert [key for key in buffers if not torch.equal(buffers[key], cut_buffers[key])] == [], label


def test_stages_hold_the_models_own_modules_under_their_names():
    model = build_model("resnet8", ModelSpec(input_shape=(1, 8, 8), classes=10))
    stages = cut(model, [range(2), range(2, 5)])
    assert [[key for key, _ in stage.named_children()] for stage in stages] == [
        ["stem", "layer1_0"],
        ["layer2_0", "layer3_0", "head"],
    ]
    of_stages = {key: parameter for stage in stages for key, parameter in stage.named_parameters()}
    of_model = dict(model.named_parameters())
    assert of_stages.keys() == of_model.keys()
    assert all(of_stages[key] is of_model[key] for key in of_model)


@pytest.mark.parametrize("ranges", [[range(4)], [range(3), range(2, 5)], [range(2, 5), range(2)], [range(5), range(0)]])
def test_ranges_that_are_no_cut(ranges):
    model = build_model("resnet8", ModelSpec(input_shape=(1, 8, 8), classes=10))
    with pytest.raises(ModelError, match="do not cut 5 blocks"):
        cut(model, ranges)


@pytest.mark.parametrize(("name", "side"), [("test_vit", 32), ("test_efficientnet", 32), ("mixer_s32_224", 64)])
def test_stages_run_on_parameters_given_from_outside(name, side):
    """The engine keeps parameter versions outside the modules: every parameter a stage reads must be replaceable."""
    model = build_model(name, ModelSpec(input_shape=(3, side, side), classes=10))
    other = shaken(copy.deepcopy(model))
    x, _ = batch((3, side, side), torch.float32)
    given = []
    y = x
    for stage, versions in zip(
        cut(model, cuts_of(len(model))["even"]), cut(other, cuts_of(len(model))["even"]), strict=True
    ):
        parameters = {key: value.detach().clone().requires_grad_() for key, value in versions.named_parameters()}
        given.extend(parameters.values())
        y = functional_call(stage, parameters, y)
    assert torch.equal(y, other(x))
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in given)
    assert all(parameter.grad is None for parameter in model.parameters())
