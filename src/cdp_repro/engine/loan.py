"""Parameters that a backward reads anew: those that a rank does not hold, or holds in a newer version by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Borrowed:
    """What the graph keeps in place of a saved parameter, or a view of one: where in the loan it lies."""

    name: str
    """Of a parameter with the same storage."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


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

    def pack(self, tensor: Tensor) -> _Borrowed | None:
        """Return what the graph keeps of a saved tensor that lies in the loan; None of any other."""
        name = self._names.get(tensor.untyped_storage()._cdata)
        if name is None:
            return None
        return _Borrowed(name, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, borrowed: _Borrowed) -> Tensor:
        """Return the tensor that was saved, in the storage that is here now."""
        assert self._tensors, "the parameters are needed while they are not here"
        storage = self._tensors[borrowed.name].untyped_storage()
        empty = torch.empty(0, dtype=borrowed.dtype, device=storage.device)
        return empty.set_(storage, borrowed.offset, borrowed.shape, borrowed.stride)

    def give_back(self) -> None:
        """Let go of the parameters; free the memory of copies, whoever still refers to them."""
        if self._is_copy:
            for tensor in self._tensors.values():
                tensor.untyped_storage().resize_(0)
        self._tensors, self._names = {}, {}

    def renew(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the same parameters in another storage."""
        self._tensors = tensors
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
