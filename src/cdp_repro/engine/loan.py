"""Parameters that a backward must read again: the rank does not hold them, or by then holds a newer version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cdp_repro.engine.memory import storage_key


class Loan:
    """A stage's parameters, which the graph of a forward does not keep alive: the backward brings them again.

    Autograd would keep every parameter that the backward needs alive from the forward on, and so use the memory that
    sharding should save. Here the graph keeps only positions in their storage. It looks these up in the storage that
    the backward brings, much as fully_shard refills the storage of its parameters.
    """

    def __init__(self, tensors: Mapping[str, Tensor], is_copy: bool) -> None:
        """`tensors` are parameters, by name.

        `is_copy`: they are copies that exist only during the forward, and again during the backward.
        """
        self._is_copy = is_copy
        self.tensors: Mapping[str, Tensor] = {}
        """The parameters, by name, while they are here."""
        self._names: dict[int, str] = {}
        """Names of the parameters, by storage."""
        self.renew(tensors)

    def pack(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that the graph keeps in place of a saved tensor of the loan; None for any other tensor.

        The function finds the tensor in the storage that is present when it is called.
        """
        name = self._names.get(storage_key(tensor))
        if name is None:
            return None
        dtype, place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        is_conjugate, is_negative = tensor.is_conj(), tensor.is_neg()  # views that a flag tells from their base

        def unpack() -> Tensor:
            assert self.tensors, "the parameters are needed while they are not here"
            storage = self.tensors[name].untyped_storage()
            found = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
            found = found.conj() if is_conjugate else found
            return torch._neg_view(found) if is_negative else found

        return unpack

    def kept_apart(self, output: Tensor) -> Tensor:
        """Return the output of the forward; a copy if it is a view of a parameter, whose values will go or change."""
        return output.clone() if storage_key(output) in self._names else output

    def give_back(self) -> None:
        """Let go of the parameters; free the memory of copies, even if something still refers to them."""
        if self._is_copy:
            for tensor in self.tensors.values():
                tensor.untyped_storage().resize_(0)
        self.tensors, self._names = {}, {}

    def renew(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the stage's parameters, by name, in a new storage."""
        self.tensors = tensors
        self._names = {storage_key(tensor): name for name, tensor in tensors.items()}
