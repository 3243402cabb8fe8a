"""The executor knows programs, not what they were made from."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from cdp_repro.engine import executor
from cdp_repro.engine.executor import Executor
from cdp_repro.engine.mailbox import Pending
from cdp_repro.schedule import Action, Value


def words(tree):
    """All names in a module: of variables, attributes, arguments, functions, classes and what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def test_it_asks_neither_the_placement_nor_the_mode():
    found = {part for word in words(ast.parse(Path(executor.__file__).read_text())) for part in word.lower().split("_")}
    assert {"action", "reads", "writes", "frees"} <= found
    unwanted = {"placement", "placements", "mode", "modes", "timeline", "timelines", "rule", "rules", "holders", "spec"}
    assert not found & unwanted


def test_a_sum_that_is_still_needed_is_copied_when_all_of_its_parts_are_there():
    """Parts lie in one buffer, which the first of them names; here the second arrives when it is waited for."""
    buffer = torch.tensor([1.0, 1.0, 0.0, 0.0])
    names = ("g0[0:1]", "g0[1:2]#1/2", "g0[1:2]#2/2")
    contents = (
        {"weight": torch.ones(4)},
        Pending(lambda: {"weight": buffer}),
        Pending(lambda: [buffer[2:].fill_(1), {}][1]),
    )
    runner = object.__new__(Executor)
    runner.values = dict(zip(map(Value.parse, names), contents, strict=True))
    runner._add(Action.parse(f"A g0[0:2]: {' '.join(names)} -> g0[0:2]"))
    assert runner.values[Value.parse("g0[0:2]")]["weight"].tolist() == [2, 2, 2, 2]
    assert buffer.tolist() == [1, 1, 1, 1]
