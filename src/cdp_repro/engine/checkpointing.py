"""Activation checkpointing inside a stage (`torch.utils.checkpoint`): refuses the form that cannot work here.

With `use_reentrant=False` the forward builds its graph as usual and drops only the saved tensors. The backward runs the
function again to recompute them, on the tensors that `StageCompute.backward` puts in place. With `use_reentrant=True`
the forward builds no graph, so a parameter's version would never receive a gradient.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction


class RefusingReentrant(TorchFunctionMode):
    """In this context, torch's functions raise ValueError inside reentrant checkpointing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in traceback.walk_stack(None)):
            raise ValueError(
                "a stage checkpoints activations with use_reentrant=True: its backward would compute with parameters "
                "of another version, and give them no gradient. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        return func(*args, **(kwargs or {}))
