"""Residual networks from torchvision's parts: a stem, one block per residual block, a head.

Source: He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385 (resnet18/50: table 1, resnet8/20:
section 4.2); the stem for small images is the one of the CDP authors' CIFAR-10 set-up (arXiv 2403.08837).

In place: torchvision's residual blocks and stems end in an in-place ReLU, on a tensor that the block made itself. They
all start with a convolution, and the head with a pooling, so no block ever writes to its input.

torchvision takes as long to import as torch, so it is only imported where it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch import nn

from cdp_repro.models.spec import ModelError, ModelSpec

LARGEST_SMALL_IMAGE = 64
"""Images up to this many pixels per side get the stem for small images."""


def build_torchvision_resnet(spec: ModelSpec, name: str) -> nn.Sequential:
    """Return torchvision's ResNet `name` ("resnet18", "resnet50"), its own modules and weights, regrouped into blocks.

    For images up to 64 px per side, a 3x3 convolution with stride 1 and no max-pool replaces torchvision's stem.
    """
    from torchvision.models import resnet as torchvision_resnet

    _refuse_dropout(spec, name)
    model = getattr(torchvision_resnet, name)(weights=None, num_classes=spec.classes)
    channels, *sides = spec.input_shape
    small = max(sides) <= LARGEST_SMALL_IMAGE
    if small:
        model.conv1 = _convolution(channels, 64, kernel=3)
    elif channels != model.conv1.in_channels:
        model.conv1 = _convolution(channels, 64, kernel=7, stride=2)
    stem = OrderedDict(conv1=model.conv1, bn1=model.bn1, relu=model.relu)
    if not small:
        stem["maxpool"] = model.maxpool
    groups = (model.layer1, model.layer2, model.layer3, model.layer4)
    return _chain(nn.Sequential(stem), [list(group) for group in groups], model.fc)


def torchvision_name(key: str) -> str:
    """Return the name that one of our tensors has in torchvision's ResNet: `stem.conv1.weight` is `conv1.weight`.

    `layer1_0.bn1.bias` is `layer1.0.bn1.bias`, and `head.fc.bias` is `fc.bias`.
    """
    block, _, rest = key.partition(".")
    return rest if block in ("stem", "head") else f"{block.replace('_', '.')}.{rest}"


def build_small_resnet(spec: ModelSpec, name: str, blocks_per_group: int) -> nn.Sequential:
    """Return the CIFAR-style ResNet of 16, 32 and 64 channels with `blocks_per_group` basic blocks in each group.

    `resnet8` (1 per group) has 78,042 parameters for 3 channels and 10 classes, `resnet20` (3 per group) 272,474.
    The groups halve height and width twice, rounding up, so that any image is large enough.
    """
    _refuse_dropout(spec, name)
    stem = OrderedDict(conv1=_convolution(spec.input_shape[0], 16, kernel=3), bn1=nn.BatchNorm2d(16), relu=nn.ReLU())
    groups: list[list[nn.Module]] = []
    width = 16
    for channels in (16, 32, 64):
        group: list[nn.Module] = []
        for _ in range(blocks_per_group):
            group.append(_basic_block(width, channels))
            width = channels
        groups.append(group)
    return _chain(nn.Sequential(stem), groups, nn.Linear(width, spec.classes))


def _chain(stem: nn.Module, groups: list[list[nn.Module]], classifier: nn.Module) -> nn.Sequential:
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for index, group in enumerate(groups, start=1):
        blocks.update((f"layer{index}_{number}", block) for number, block in enumerate(group))
    head = OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=classifier)
    blocks["head"] = nn.Sequential(head)
    return nn.Sequential(blocks)


def _basic_block(inputs: int, outputs: int) -> nn.Module:
    """Return a basic block that halves the image and projects the shortcut where the number of channels changes."""
    from torchvision.models.resnet import BasicBlock

    stride, projection = 1, None
    if inputs != outputs:
        stride = 2
        projection = nn.Sequential(
            _convolution(inputs, outputs, kernel=1, stride=stride),
            nn.BatchNorm2d(outputs),
        )
    block = BasicBlock(inputs, outputs, stride, projection)
    _initialise(block.conv1)
    _initialise(block.conv2)
    return cast(nn.Module, block)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    _initialise(convolution)
    return convolution


def _initialise(convolution: nn.Conv2d) -> None:
    """Draw weights as torchvision's ResNet does."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _refuse_dropout(spec: ModelSpec, name: str) -> None:
    if spec.dropout > 0:
        raise ModelError(f"dropout={spec.dropout} has no effect on {name}, which has no dropout layers: use dropout=0")
