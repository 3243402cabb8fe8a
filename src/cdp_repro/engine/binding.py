"""Runs a module with given tensors in place of its parameters and buffers.

It does the same as `torch.func.functional_call`, which costs about 30 microseconds per tensor and call. A training step
makes one call per micro-batch and stage. Here the places are found once; a call only assigns them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from torch import Tensor, nn

_Places = list[tuple[MutableMapping[str, Tensor], str, str]]
"""Registry of a part of the module, key in it, and name of the tensor in the whole module."""


class Binding:
    """The places of a module's parameters and buffers, by the names of `named_parameters` and `named_buffers`.

    A tensor that the module holds in several places has one name and several places.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters: _Places = []
        self._buffers: _Places = []
        self._with_buffers = [part for part in module.modules() if part._buffers]
        names: dict[int, str] = {}
        for prefix, part in module.named_modules():
            for places, registry in ((self._parameters, part._parameters), (self._buffers, part._buffers)):
                for key, tensor in registry.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        places.append((registry, key, name))
        self._places = self._parameters + self._buffers

    @contextmanager
    def bound(self, parameters: Mapping[str, Tensor], buffers: MutableMapping[str, Tensor]) -> Iterator[None]:
        """Put the tensors in place for the body; if the body replaces a buffer, `buffers` gets the new one."""
        before = self._put(parameters, buffers)
        try:
            yield
        finally:
            for registry, key, name in self._buffers:
                buffers[name] = registry.get(key)  # type: ignore[assignment]  # None is refused after the first forward
            self._put_back(before)

    @contextmanager
    def bound_again(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Put the tensors in place for a body that may run the module again but must not change `buffers`.

        The body works on copies of the buffers. Only those that it reads are copied: mostly none.
        """
        copies: dict[Tensor, Tensor] = {}
        own = [part._buffers for part in self._with_buffers]
        before = self._put(parameters, buffers)
        try:
            for part in self._with_buffers:
                part.__dict__["_buffers"] = _CopiedWhenRead(part._buffers, copies)
            yield
        finally:
            for part, registered in zip(self._with_buffers, own, strict=True):
                part.__dict__["_buffers"] = registered
            self._put_back(before)

    def _put(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[Tensor]:
        """Put tensors in their places; return the previous ones."""
        before, tensors = [registry[key] for registry, key, _ in self._places], {**parameters, **buffers}
        for registry, key, name in self._places:
            registry[key] = tensors[name]
        return before

    def _put_back(self, before: list[Tensor]) -> None:
        for (registry, key, _), tensor in zip(self._places, before, strict=True):
            registry[key] = tensor


class _CopiedWhenRead(dict[str, Tensor | None]):
    """The buffers of a part of a module, each copied on its first read; all parts share `copies`."""

    def __init__(self, buffers: Mapping[str, Tensor | None], copies: dict[Tensor, Tensor]) -> None:
        super().__init__(buffers)
        self._copies = copies

    def __getitem__(self, key: str) -> Tensor | None:
        tensor = super().__getitem__(key)
        if tensor is None:
            return None
        if tensor not in self._copies:
            self._copies[tensor] = tensor.clone()
        return self._copies[tensor]
