"""Parameters that a backward reads anew: those that a rank does not hold, or holds in a newer version by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cdp_repro.engine.memory import storage_key


class Loan:
    """A stage's parameters, which the graph of a forward does not keep: the backward brings them again.

    Autograd would keep every parameter that the backward needs alive from the forward on, and with it the memory
    that sharding is to save. Here the graph keeps places in their storage, and finds them again in the storage that
    the backward brings, as fully_shard does by refilling the storage of its parameters.
    """

    def __init__(self, tensors: Mapping[str, Tensor], is_copy: bool = True) -> None:
        """`is_copy`: they are here for the time of the forward only, and again for that of the backward."""
        self._is_copy = is_copy
        self._tensors: Mapping[str, Tensor] = {}
        self._names: dict[int, str] = {}
        """By storage."""
        self.renew(tensors)

    def pack(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return what the graph keeps of a saved tensor that lies in the loan; None of any other.

        When called, it finds the tensor in the storage that is here then.
        """
        name = self._names.get(storage_key(tensor))
        if name is None:
            return None
        dtype, place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

        def unpack() -> Tensor:
            assert self._tensors, "the parameters are needed while they are not here"
            storage = self._tensors[name].untyped_storage()
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)

        return unpack

    def give_back(self) -> None:
        """Let go of the parameters; free the memory of copies, whoever still refers to them."""
        if self._is_copy:
            for tensor in self._tensors.values():
                tensor.untyped_storage().resize_(0)
        self._tensors, self._names = {}, {}

    def renew(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the same parameters in another storage."""
        self._tensors = tensors
        self._names = {storage_key(tensor): name for name, tensor in tensors.items()}
