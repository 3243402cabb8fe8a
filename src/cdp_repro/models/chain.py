"""Models as blocks, in a chain or in branches that join, and their cut into stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from cdp_repro.models.spec import ModelError
from cdp_repro.schedule.branches import Sources, chain


class Joining(nn.Sequential):
    """Blocks in sequence; the first one takes several inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output of the last block, [B, ...], for inputs that are [B, ...] each."""
        first, *others = self
        output: Tensor = first(*inputs)
        for block in others:
            output = block(output)
        return output


class Branched(nn.Sequential):
    """Modules that read the outputs of earlier modules, or the data; `sources` gives those of each module."""

    def __init__(self, modules: OrderedDict[str, nn.Module], sources: Sources) -> None:
        super().__init__(modules)
        self.sources = sources

    def forward(self, data: Tensor) -> Tensor:
        """Return the output of the last module, [B, ...], for data [B, ...]."""
        outputs: dict[int, Tensor] = {}
        for number, module in enumerate(self):
            inputs = [outputs.pop(source) for source in self.sources[number]] or [data]
            outputs[number] = module(*inputs)
        return outputs[len(self) - 1]


def joined(stages: Sequence[nn.Module], sources: Sources) -> nn.Sequential:
    """Return the whole model, joined from its stages."""
    if sources == chain(len(stages)):
        return nn.Sequential(*stages)
    return Branched(OrderedDict((str(number), stage) for number, stage in enumerate(stages)), sources)


def segments(model: nn.Sequential) -> list[int]:
    """Return the number of blocks of each branch of a model, in order; a chain is one branch."""
    sources = model.sources if isinstance(model, Branched) else chain(len(model))
    starts = [number for number, read in enumerate(sources) if read != (number - 1,)]
    return [stop - start for start, stop in pairwise([*starts, len(model)])]


def cut(model: nn.Sequential, ranges: Sequence[range], sources: Sources = ()) -> list[nn.Sequential]:
    """Group the blocks of `model` into stages.

    The stages hold the model's own modules, not copies, under the names they have in the model, so the parameter names
    of all stages together are those of the model.

    Args:
        model: named blocks in forward order, as `build_model` returns them.
        ranges: block indices of each stage, as `cdp_repro.predict.partition.partition` returns them.
        sources: for each stage, the stages whose outputs it reads; () for a chain.

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
    reads = sources or chain(len(ranges))
    return [
        (Joining if len(read) > 1 else nn.Sequential)(OrderedDict(blocks[index] for index in run))
        for run, read in zip(ranges, reads, strict=True)
    ]


def hidden_matrices(stages: Sequence[nn.Sequential], sources: Sources = ()) -> frozenset[nn.Parameter]:
    """Return the matrices and filters of all blocks except those that read the data and the last one, the head.

    A gain or bias may have dimensions of one value, as [1, 1, C]: it is none of them. `sources` gives, for each stage,
    the stages whose outputs it reads; () for a chain.
    """
    reads = sources or chain(len(stages))
    of_data = {id(stage[0]) for stage, read in zip(stages, reads, strict=True) if not read}
    *blocks, _head = [block for stage in stages for block in stage]
    hidden = [block for block in blocks if id(block) not in of_data]
    parameters = (parameter for block in hidden for parameter in block.parameters())
    return frozenset(parameter for parameter in parameters if sum(size > 1 for size in parameter.shape) >= 2)
