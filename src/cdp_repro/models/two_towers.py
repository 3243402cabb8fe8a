"""Two towers that see two views of an image, and a trunk that joins them: a network with branches.

The left tower reads the image, the right one its mirror image; they share no weights and can run side by side. The
trunk reads the feature maps of both. Source of the idea: the two-stream networks of Simonyan and Zisserman, arXiv
1406.2199; the sizes are ours.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from cdp_repro.models.chain import Branched
from cdp_repro.models.spec import ModelSpec
from cdp_repro.schedule.branches import towers


def build_two_towers(spec: ModelSpec) -> Branched:
    """Return two towers and a trunk of `depth` blocks each, and a head.

    The towers have `width` channels, the trunk twice as many.
    """
    from torchvision.models.resnet import BasicBlock  # here: it takes seconds

    depth, width = spec.depth, spec.width
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for name, is_mirrored in (("left", False), ("right", True)):
        blocks[f"{name}0"] = Stem(spec, is_mirrored)
        blocks.update((f"{name}{number}", BasicBlock(width, width)) for number in range(1, depth))
    blocks["trunk0"] = Join(2 * width)
    blocks.update((f"trunk{number}", BasicBlock(2 * width, 2 * width)) for number in range(1, depth))
    blocks["head"] = nn.Sequential(
        OrderedDict(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            drop=nn.Dropout(spec.dropout),
            fc=nn.Linear(2 * width, spec.classes),
        )
    )
    return Branched(blocks, towers(depth, depth, depth + 1))


class Stem(nn.Module):
    """Image [B, channels, height, width] -> feature map [B, width, height, width], of the image or its mirror image."""

    def __init__(self, spec: ModelSpec, is_mirrored: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(spec.input_shape[0], spec.width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(spec.width)
        self.drop = nn.Dropout2d(spec.dropout)
        self._is_mirrored = is_mirrored

    def forward(self, images: Tensor) -> Tensor:
        """Return the feature map, [B, features, ...], of images, [B, channels, ...]."""
        view = torch.flip(images, dims=[-1]) if self._is_mirrored else images
        features: Tensor = self.drop(torch.relu(self.bn(self.conv(view))))
        return features


class Join(nn.Module):
    """Two feature maps [B, width/2, ...] -> one of half the height and width, [B, width, ...]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the joined feature map, [B, width, ...]."""
        return torch.relu(self.bn(self.conv(torch.cat((left, right), dim=1))))
