"""Stages and functions that no engine can be made of: each is refused, with what works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    end, last = 0, (0, "", False)
    for start, stop, number, name, trains in sorted(_memory_of_parameters(stages)):
        if start < end and number != last[0]:
            one, other = sorted((last[0], number))
            raise ValueError(
                f"stages {one} and {other} share the parameter {name}: "
                "each stage has versions of its own, so put both uses into one stage"
            )
        if start < end and (trains or last[2]):
            raise ValueError(
                f"the parameters {last[1]} and {name} of stage {number} share memory, which versions of each would "
                "not: make them one parameter, as in b.weight = a.weight"
            )
        if stop > end:
            end, last = stop, (number, name, trains)


def _memory_of_parameters(stages: Sequence[nn.Module]) -> Iterator[tuple[int, int, int, str, bool]]:
    """Yield, for each parameter, where its values begin and end, its stage and name, and whether it takes gradients.

    One that has several places in a stage is named once. Of one whose values do not lie end to end, only the first
    counts.
    """
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            start = 0 if is_lazy(parameter) else parameter.data_ptr()  # 0: it has no values yet, or none at all
            if start:
                size = parameter.nbytes if parameter.is_contiguous() else 1
                yield start, start + size, number, name, parameter.requires_grad
