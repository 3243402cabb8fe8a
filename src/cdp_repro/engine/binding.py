"""Runs a module with given tensors in place of its parameters and buffers.

The same as `torch.func.functional_call`, which costs some 30 microseconds a tensor and call; a training step of the
engine has as many calls as micro-batches times stages. Here the places are found once and then only assigned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from torch import Tensor, nn


class Binding:
    """The places of a module's parameters and buffers, by the names of `named_parameters` and `named_buffers`.

    A tensor that the module holds in several places has one name and all of its places.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[MutableMapping[str, Tensor], str, str]] = []
        names: dict[int, str] = {}
        for prefix, part in module.named_modules():
            for registry in (part._parameters, part._buffers):
                for key, tensor in registry.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        self._places.append((registry, key, name))

    @contextmanager
    def bound(self, parameters: Mapping[str, Tensor], buffers: MutableMapping[str, Tensor]) -> Iterator[None]:
        """Put the tensors in place for the body; a buffer that the body replaces is replaced in `buffers`."""
        before = [registry[key] for registry, key, _ in self._places]
        for registry, key, name in self._places:
            registry[key] = parameters[name] if name in parameters else buffers[name]
        try:
            yield
        finally:
            for (registry, key, name), tensor in zip(self._places, before, strict=True):
                if name in buffers:
                    buffers[name] = registry[key]
                registry[key] = tensor
