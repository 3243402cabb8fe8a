"""What the first forward of a stage must show, so that the stage trains; later forwards are not looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from cdp_repro.engine.autograd_graph import leaves_of


def check_what_it_made(
    module: nn.Module, buffers: Mapping[str, Tensor], given: Sequence[Tensor], output: Tensor
) -> None:
    """Raise ValueError if a forward has made a buffer, or used what a rehearsal made, which has no values.

    `buffers` are those before it, `given` the tensors that it was given; if those are fake, this is a rehearsal.
    """
    if isinstance(output, FakeTensor) and not any(isinstance(each, FakeTensor) for each in given):
        raise ValueError(
            "a stage or loss_fn computes with a tensor without values, which it has kept from a forward that only "
            "looks for shapes: keep what forwards make in the stage itself, not in a cache such as lru_cache"
        )
    if made := [name for name, _ in module.named_buffers() if name not in buffers]:
        raise ValueError(
            f"a stage makes its buffer {made[0]} in a forward; each worker has a copy of its own, made before: "
            "register it with its values in __init__"
        )


def reaches_all(parameters: Iterable[Tensor], given: Sequence[Tensor], output: Tensor) -> bool:
    """Whether the graph of the output leads to all parameters that take gradients.

    If not, reentrant checkpointing may be why, but some networks have such parameters anyway. So a second forward has
    to look for the checkpointing call itself; it leaves no trace. torch refuses reentrant checkpointing in the
    backward, but not in a part whose inputs take no gradient, which it would silently not train.

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
