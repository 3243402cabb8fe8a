"""What ranks tell each other besides the messages of the schedule: plain values and tensors, never objects.

A message is JSON followed by the bytes of the tensors that the JSON names. None of it is executed: whoever reaches a
port of a rank can disturb a run, but a pickle would let them run code in it.

    8 bytes      length of the JSON
    JSON         null, true, 1, 0.5, "text"; {"list": [..]}, {"tuple": [..]}, {"dict": [[key, value], ..]},
                 {"tensor": ["float32", [2, 3]]}
    bytes        of the tensors, in the order in which the JSON names them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 3
_HEADER_BYTES = 8


def encode(value: object) -> Tensor:
    """Return a value as bytes, uint8 [n].

    Args:
        value: None, bool, int, float, str, Tensor, or dict, list and tuple of them; keys of a dict likewise.

    Raises:
        TypeError: it holds something else.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_plain(value, tensors)).encode()
    header = torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)
    return torch.cat([header, torch.frombuffer(bytearray(text), dtype=torch.uint8), *map(_bytes, tensors)])


def decode(message: Tensor) -> Any:
    """Return the value that `encode` turned into these bytes, [n] uint8; its tensors are on the CPU."""
    length = int(message[:_HEADER_BYTES].clone().view(torch.int64))
    end = _HEADER_BYTES + length
    return _value(json.loads(message[_HEADER_BYTES:end].numpy().tobytes()), [message[end:]])


def _plain(value: object, tensors: list[Tensor]) -> object:
    """Return a value in the form that JSON holds; append its tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": looks_of(value)}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key, tensors), _plain(each, tensors)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(each, tensors) for each in value]}  # type: ignore[attr-defined]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be told to another rank: make it numbers, text and tensors")


def _value(plain: Any, rest: list[Tensor]) -> Any:
    """Return the value of its JSON form; take its tensors from the front of the remaining bytes."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "dict":
        return {_value(key, rest): _value(each, rest) for key, each in content}
    if kind != "tensor":
        found = [_value(each, rest) for each in content]
        return found if kind == "list" else tuple(found)
    tensor = empty(content)
    front, rest[0] = rest[0][: tensor.nbytes], rest[0][tensor.nbytes :]
    _bytes(tensor).copy_(front)
    return tensor


def looks_of(tensor: Tensor) -> list[Any]:
    """Return type and shape of a tensor as plain values."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def empty(looks: Sequence[Any], device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor that looks as `looks_of` says, with arbitrary values."""
    name, shape = looks
    return torch.empty(shape, dtype=getattr(torch, name), device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n]: a view if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def send(value: object, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Send a value to another rank, which must `receive` it. The group must be gloo's, as for all functions here."""
    for part in parts(value):
        dist.send(part, rank, group=group, tag=TAG)


def parts(value: object) -> tuple[Tensor, Tensor]:
    """Return the tensors in which a value is sent: the length of its message, and the message."""
    message = encode(value)
    return torch.tensor([len(message)]), message


def receive(rank: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return what another rank sends."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, group=group, tag=TAG)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(message, rank, group=group, tag=TAG)
    return decode(message)


def gather(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; on others an empty list. All ranks must call it."""
    if dist.get_rank():
        send(value, 0, group)
        return []
    return [value, *(receive(rank, group) for rank in range(1, dist.get_world_size()))]


def share(value: object, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank 0. All ranks must call it."""
    message = encode(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)])
    dist.broadcast(length, 0, group=group)
    if dist.get_rank() == 0:
        dist.broadcast(message, 0, group=group)
        return value
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, 0, group=group)
    return decode(message)
