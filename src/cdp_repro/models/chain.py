"""Cut a chain of blocks into stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from cdp_repro.models.spec import ModelError


def cut(model: nn.Sequential, ranges: Sequence[range]) -> list[nn.Sequential]:
    """Group the blocks of `model` into stages.

    The stages hold the model's own modules, not copies, under the names they have in the model, so the parameter names
    of all stages together are those of the model.

    Args:
        model: named blocks in forward order, as `build_model` returns them.
        ranges: block indices of each stage, as `cdp_repro.predict.partition.partition` returns them.

    Raises:
        ModelError: the ranges are not non-empty runs that follow each other and cover every block.
    """
    blocks = list(model.named_children())
    covered = [index for run in ranges for index in run]
    if covered != list(range(len(blocks))) or not all(ranges):
        raise ModelError(
            f"the stages {[list(run) for run in ranges]} do not cut {len(blocks)} blocks: each stage takes at least "
            f"one block, in order, and together they cover 0..{len(blocks) - 1} once"
        )
    return [nn.Sequential(OrderedDict(blocks[index] for index in run)) for run in ranges]


def hidden_matrices(stages: Sequence[nn.Sequential]) -> frozenset[nn.Parameter]:
    """Return the matrices and filters of all blocks but the first, which meets the input, and the last, the head."""
    blocks = [block for stage in stages for block in stage][1:-1]
    return frozenset(parameter for block in blocks for parameter in block.parameters() if parameter.ndim >= 2)
