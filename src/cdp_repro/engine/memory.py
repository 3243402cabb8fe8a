"""Activation bytes: the tensors that autograd saves for the backward and those that the engine holds, counted once.

A tensor counts from the moment it is saved or held until its storage dies; two tensors that share a storage
count once. Parameters, buffers and views of their storage never count (a Linear saves a view of its weight).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class ActivationMeter:
    """Counts the live activation bytes of one device.

    `live_bytes` is exact whenever no operator is running.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count `tensor`, of any shape, until its storage dies."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._live:
            return
        size = storage.nbytes()
        self.live_bytes += size
        self._live[key] = weakref.ref(storage, lambda _, key=key, size=size: self._release(key, size))  # type: ignore[misc]

    def _release(self, key: int, size: int) -> None:
        self.live_bytes -= size
        del self._live[key]


def storage_key(tensor: Tensor) -> int:
    """Return a key that is unique among the storages alive."""
    key: int = tensor.untyped_storage()._cdata
    return key
