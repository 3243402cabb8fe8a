"""What ranks tell each other: plain values and tensors whole, objects never."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import cdp_repro
from cdp_repro.launch.control_messages import decode, encode, gather, receive, send, share

PACKAGE = Path(cdp_repro.__file__).parent
TENSORS = [
    torch.randn(2, 3, dtype=torch.float64), torch.tensor(7), torch.tensor([True, False]), torch.empty(0, 4),
    torch.arange(6, dtype=torch.int16).reshape(2, 3).T, torch.randn(3).bfloat16(), torch.ones(2, requires_grad=True),
    torch.randn(2, dtype=torch.complex64),
]  # fmt: skip
VALUES = [
    None, True, 3, -0.1, math.inf, "Grüße\0", [], (), {}, [1, (2, [3])], {0: {"a": None}, ("x", 1): [1.5]},
    {"state": {0: {"step": torch.tensor(1.0), "betas": (0.9, 0.999)}}},
]  # fmt: skip


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value):
    assert same(decode(encode(value)), value)


def test_tensors_come_back_bitwise_in_their_places():
    value = {"in": TENSORS, "last": (TENSORS[0], "text")}
    assert same(decode(encode(value)), value)
    assert math.isnan(decode(encode(math.nan)))
    assert encode(torch.zeros(1000)).numel() < 4100, "a tensor is its bytes"


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, Path("x"), ValueError("x"), b"bytes", [torch.float32]],
    ids=lambda value: type(value).__name__,
)
def test_objects_are_refused(value):
    with pytest.raises(TypeError, match="cannot be told to another rank: make it numbers, text and tensors"):
        encode(value)


def talk():
    rank = torch.distributed.get_rank()
    told = {"rank": rank, "tensor": torch.full((rank,), float(rank))}
    gathered = gather(told)
    shared = share((rank, torch.arange(3)))
    if rank == 1:
        send([1, "two", torch.ones(2)], 2)
    return gathered, shared, receive(1) if rank == 2 else None


def test_ranks_gather_share_and_send(tmp_path):
    (gathered, shared, _), (nothing, seen, _), (_, also, received) = run_ranks(talk, 3, folder=tmp_path)
    assert nothing == []
    assert same(gathered, [{"rank": rank, "tensor": torch.full((rank,), float(rank))} for rank in range(3)])
    assert all(same(each, (0, torch.arange(3))) for each in (shared, seen, also))
    assert same(received, [1, "two", torch.ones(2)])


# Nothing that would unpickle what another rank sends

PICKLING = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "Manager", "shelve", "dill", "cloudpickle",
}  # fmt: skip
BETWEEN_PROCESSES_OF_ONE_USER = {"launch/failures.py", "launch/in_rank.py", "launch/local_ranks.py"}
"""These write what a rank returns or raises to a file in a folder that only its user may enter."""


def unpickling(source: str) -> set[str]:
    """Return what in a source unpickles: torch's object collectives, pickle itself, torch.load of more than weights."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name.partition(".")[0] for alias in node.names} | {getattr(node, "module", None)}
            found |= names & (PICKLING | {"pickle", "_pickle", "marshal"})
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        found |= {name} & PICKLING
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            found |= {"torch.load"} if given.get("weights_only") != "True" else set()
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_gather_object(a, b)", "from pickle import loads", "import pickle",
        "torch.load(file)", "torch.load(file, weights_only=False)", "share = dist.broadcast_object_list",
        "from torch.distributed import send_object_list",
    ],
)  # fmt: skip
def test_the_check_sees_what_unpickles(source):
    assert unpickling(source)


def test_nothing_unpickles_what_another_host_can_send():
    found = {path.relative_to(PACKAGE).as_posix(): unpickling(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, what in found.items() if what} == BETWEEN_PROCESSES_OF_ONE_USER
