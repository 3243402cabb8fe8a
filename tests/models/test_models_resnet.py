"""The ResNets: torchvision's own numbers, and the stem for small images."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from cdp_repro.models import ModelSpec, build_model


def stem_of(name, input_shape):
    with torch.device("meta"):
        return build_model(name, ModelSpec(input_shape=input_shape, classes=10)).stem


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("side", [32, 64])
def test_small_images_get_the_small_stem(name, side):
    stem = stem_of(name, (3, side, side))
    assert [key for key, _ in stem.named_children()] == ["conv1", "bn1", "relu"]
    assert (stem.conv1.kernel_size, stem.conv1.stride, stem.conv1.padding) == ((3, 3), (1, 1), (1, 1))


@pytest.mark.parametrize("input_shape", [(3, 65, 65), (1, 224, 224), (3, 32, 65)])
def test_large_images_get_torchvisions_stem(input_shape):
    stem = stem_of("resnet18", input_shape)
    assert [key for key, _ in stem.named_children()] == ["conv1", "bn1", "relu", "maxpool"]
    assert (stem.conv1.kernel_size, stem.conv1.stride, stem.conv1.padding) == ((7, 7), (2, 2), (3, 3))
    assert stem.conv1.in_channels == input_shape[0]


def test_regrouped_resnet_is_torchvisions():
    """Same draws from the same seed, same outputs, same gradients, bit for bit."""
    ours = build_model("resnet18", ModelSpec(input_shape=(3, 72, 72), classes=7), seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = torchvision.models.resnet18(weights=None, num_classes=7)
    images = torch.randn(2, 3, 72, 72, generator=torch.Generator().manual_seed(0))
    outputs = [model(images) for model in (ours, theirs)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)
    assert all(a.grad.any() for a, _ in pairs)


@pytest.mark.parametrize("name", ["resnet8", "resnet20"])
def test_small_resnets_shapes(name):
    model = build_model(name, ModelSpec(input_shape=(1, 8, 8), classes=10))
    x = torch.zeros(2, 1, 8, 8)
    shapes = {}
    for key, block in model.named_children():
        x = block(x)
        shapes[key[: len("layer1")]] = tuple(x.shape[1:])
    assert shapes == {
        "stem": (16, 8, 8),
        "layer1": (16, 8, 8),
        "layer2": (32, 4, 4),
        "layer3": (64, 2, 2),
        "head": (10,),
    }


def test_small_resnet_convolutions_are_drawn_like_torchvisions():
    model = build_model("resnet20", ModelSpec(input_shape=(3, 8, 8), classes=10))
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 1 + 9 * 2 + 2
    for convolution in convolutions:
        fan_out = convolution.out_channels * convolution.kernel_size[0] ** 2
        assert convolution.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.15)
