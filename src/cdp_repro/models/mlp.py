"""A multi-layer perceptron: the smallest model whose stages can all cost the same."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from cdp_repro.models.spec import ModelSpec


def build_mlp(spec: ModelSpec) -> nn.Sequential:
    """Return `depth` blocks (Linear, ReLU, and Dropout if `dropout` > 0) and a Linear head, depth + 1 blocks in all.

    The first block also flattens the image: flattening costs nothing and, as a separate block, could be an empty stage.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    width = prod(spec.input_shape)
    for layer in range(spec.depth):
        parts: list[nn.Module] = [nn.Flatten()] if layer == 0 else []
        parts += [nn.Linear(width, spec.hidden), nn.ReLU()]
        if spec.dropout > 0:
            parts.append(nn.Dropout(spec.dropout))
        blocks[f"hidden{layer}"] = nn.Sequential(*parts)
        width = spec.hidden
    blocks["head"] = nn.Linear(width, spec.classes)
    return nn.Sequential(blocks)
