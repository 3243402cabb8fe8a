"""Activation bytes: what autograd saves for the backward plus what the engine holds for it, counted once.

A tensor counts from the moment it is saved or held until its storage dies; two tensors that share a storage
count once. Parameters, buffers and views of their storage never count (a Linear saves a view of its weight).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class ActivationMeter:
    """Counts the live activation bytes of one device.

    `live_bytes` is exact at any moment in which no operator is running.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count `tensor` until its storage dies."""
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
    """Return what tells the storage of a tensor from all others that live."""
    key: int = tensor.untyped_storage()._cdata
    return key
