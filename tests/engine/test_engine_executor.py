"""The executor knows programs, not what they were made from."""

from __future__ import annotations

import ast
from pathlib import Path

from cdp_repro.engine import executor


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
