"""What the first forward of a stage must show, so that the stage trains; later forwards are not looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from cdp_repro.engine.autograd_graph import leaves_of


class HookWatch(TorchFunctionMode):
    """Sees whether the forward in its context sets hooks on the gradients of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, and remember whether it sets a hook."""
        self.found |= function is Tensor.register_hook
        return function(*args, **(kwargs or {}))


def check_what_it_made(
    module: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor | None],
    given: Sequence[Tensor],
    output: Tensor,
) -> None:
    """Raise ValueError if a forward has made or lost a buffer, or used what a rehearsal made, which has no values.

    `before` and `after` are the buffers, `given` the tensors that it was given; if those are fake, this is a rehearsal.
    """
    if isinstance(output, FakeTensor) and not any(isinstance(each, FakeTensor) for each in given):
        raise ValueError(
            "a stage or loss_fn computes with a tensor without values, which it has kept from a forward that only "
            "looks for shapes: keep what forwards make in the stage itself, not in a cache such as lru_cache"
        )
    if made := [name for name, _ in module.named_buffers() if name not in before]:
        raise ValueError(
            f"a stage makes its buffer {made[0]} in a forward; each worker has a copy of its own, made before: "
            "register it with its values in __init__"
        )
    for name, buffer in before.items():
        if (found := _kind(after[name])) != (wanted := _kind(buffer)):
            raise ValueError(
                f"a stage makes its buffer {name} {found} in a forward, which was {wanted}: checkpoints, messages and "
                "the mean over workers need one type and shape from the start"
            )


def _kind(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} {[*buffer.shape]}"


def reaches_all(parameters: Iterable[Tensor], given: Sequence[Tensor], output: Tensor) -> bool:
    """Whether the graph of the output leads to all parameters that take gradients.

    If not, the cause may be reentrant checkpointing, which leaves no trace in the graph; but some networks have such
    parameters anyway. So a second forward has to look for the checkpointing call itself. torch refuses reentrant
    checkpointing in the backward, but not in a part whose inputs take no gradient, which it would silently not train.

    Raises:
        ValueError: the graph leads to a tensor that is not `given`, which would not train.
    """
    reached = {id(leaf): leaf for leaf in leaves_of(output)}
    known = {id(tensor) for tensor in given}
    if foreign := [leaf for key, leaf in reached.items() if key not in known]:
        raise ValueError(
            f"a stage or loss_fn uses a tensor {tuple(foreign[0].shape)} that takes a gradient and is no parameter "
            "of that stage, as it has versions of its own: nothing would train it. Make it a parameter of the "
            "stage that uses it (of the last one, if loss_fn does), or detach() it"
        )
    return all(id(parameter) in reached for parameter in parameters)
