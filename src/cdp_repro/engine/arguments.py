"""Stages and functions that no engine can be made of: each is refused, with what works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def check_stages(stages: Sequence[nn.Module]) -> None:
    """Raise ValueError unless `stages` is a non-empty list of modules of dense tensors."""
    if not isinstance(stages, (Sequence, nn.ModuleList)):
        parts = (
            f", or [*module] for a stage of each of its {len(stages)} parts"
            if isinstance(stages, nn.Sequential)
            else ""
        )
        raise ValueError(f"stages is a {type(stages).__name__}, not a list: give [module] for one stage{parts}")
    if not stages:
        raise ValueError("stages=[]: at least 1 stage is needed")
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(
                f"stage {number} is a {type(stage).__name__}, not a module: call it in the forward of an nn.Module of "
                "its own, or of the stage before it"
            )
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if not is_lazy(tensor) and tensor.layout is not torch.strided:
                raise ValueError(
                    f"{name} of stage {number} is {tensor.layout}: versions and messages are of dense tensors; call "
                    "to_dense(), or, if the commands need not plan the stage, keep a constant one in a plain attribute"
                )


_FUNCTIONS = {
    "loss_fn": "torch.nn.functional.cross_entropy",
    "optimizer": "lambda parameters: torch.optim.SGD(parameters, lr=0.1), which makes one for each stage",
    "delay": "ErrorFeedback of cdp_repro.engine.delay",
    "learning_rate_factor": "lambda step: 0.1 ** (step // 1000)",
    "autocast": 'lambda: torch.autocast("cpu", torch.bfloat16)',
}
"""An example for each argument that must be callable."""


def check_functions(**given: object) -> None:
    """Raise ValueError, with an example, for an argument of this name that cannot be called."""
    for name, function in given.items():
        if not callable(function):
            raise ValueError(f"{name} is a {type(function).__name__}, not a function: give {_FUNCTIONS[name]}")


def refuse_shared_parameters(stages: Sequence[nn.Module]) -> None:
    """Raise ValueError if stages share a parameter, or parameters share memory and one of them takes gradients."""
    last = _Memory(0, 0, 0, "", is_trained=False)
    """Of those before, the one that ends last."""
    for each in sorted(_memory_of_parameters(stages)):
        if each.begin < last.end and each.stage != last.stage:
            one, other = sorted((last.stage, each.stage))
            raise ValueError(
                f"stages {one} and {other} share the parameter {each.name}: "
                "each stage has versions of its own, so put both uses into one stage"
            )
        if each.begin < last.end and (each.is_trained or last.is_trained):
            raise ValueError(
                f"the parameters {last.name} and {each.name} of stage {each.stage} share memory, which versions of "
                "each would not: make them one parameter, as in b.weight = a.weight"
            )
        last = max(last, each, key=lambda memory: memory.end)


class _Memory(NamedTuple):
    """Where the values of a parameter lie; of those that do not lie end to end, only the first counts."""

    begin: int
    end: int
    stage: int
    name: str
    is_trained: bool


def _memory_of_parameters(stages: Sequence[nn.Module]) -> Iterator[_Memory]:
    """Yield the memory of each parameter; one that has several places in a stage is named once."""
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            begin = 0 if is_lazy(parameter) else parameter.data_ptr()  # 0: it has no values yet, or none at all
            if begin:
                size = parameter.nbytes if parameter.is_contiguous() else 1
                yield _Memory(begin, begin + size, number, name, parameter.requires_grad)
