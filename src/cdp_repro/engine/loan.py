"""Parameters that a rank does not hold, or not whole: here for the time of one forward, again for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Borrowed:
    """What the graph keeps in place of a saved parameter, or a view of one: where in the loan it lies."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Loan:
    """A stage's parameters in one buffer, which is given back between forward and backward.

    Autograd would keep every parameter that the backward needs alive from the forward on, and with it the memory
    that sharding is to save. Here the graph keeps places in the buffer, and finds them again in the buffer that the
    backward brings, as fully_shard does by refilling the storage of its parameters.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._buffer = _storage(tensors)

    def pack(self, tensor: Tensor) -> _Borrowed | None:
        """Return what the graph keeps of a saved tensor that lies in the loan; None of any other."""
        if self._buffer is None or tensor.untyped_storage()._cdata != self._buffer._cdata:
            return None
        return _Borrowed(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, borrowed: _Borrowed) -> Tensor:
        """Return the tensor that was saved, in the buffer that is here now."""
        assert self._buffer is not None, "the parameters are needed while they are not here"
        empty = torch.empty(0, dtype=borrowed.dtype, device=self._buffer.device)
        return empty.set_(self._buffer, borrowed.offset, borrowed.shape, borrowed.stride)

    def give_back(self) -> None:
        """Free the memory of the parameters, whoever still refers to them."""
        if self._buffer is not None:
            self._buffer.resize_(0)
        self._buffer = None

    def renew(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the same parameters in another buffer."""
        self._buffer = _storage(tensors)


def _storage(tensors: Mapping[str, Tensor]) -> torch.UntypedStorage | None:
    return next((tensor.untyped_storage() for tensor in tensors.values()), None)
