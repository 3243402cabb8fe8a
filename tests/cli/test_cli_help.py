"""What --help and the documents give as examples can be typed."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from cdp_repro.config.compose import compose_config
from cdp_repro.config.sweep_cells import expand_sweep

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "plan", "verify", "export")
ELSEWHERE = ("resume=", "restart=", "launcher.", "launcher=", "program=", "model.weights=")
"""Beginnings of words that need a run or a file, or are about many runs."""
_CALL = r"cdp-(?:train|plan|verify) "


def examples() -> list[str]:
    """Return the command lines, without their explanations and what a shell makes of their output."""
    helps = [import_module(f"cdp_repro.cli.{name}").USAGE for name in COMMANDS]
    found = [line for text in helps for line in re.findall(rf"^  ({_CALL}.*)$", text, re.MULTILINE)]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        found += re.findall(rf"^(?:\$ )?({_CALL}.*)$", text, re.MULTILINE)
        found += [" ".join(each.split()) for each in re.findall(rf"(?<!`)`({_CALL}[^`]*)`(?!`)", text)]
    bare = [re.split(r"\s{2,}| \| | 2>", line)[0] for line in found]
    return sorted({line for line in bare if "--config-dir" not in line and "--help" not in line})


@pytest.mark.parametrize("example", examples())
def test_examples_can_be_typed(example):
    words = [word for word in shlex.split(example)[1:] if "=" in word and not word.startswith(("-", *ELSEWHERE))]
    for cell in expand_sweep(words):
        compose_config(cell, check_device=False)


def test_there_are_examples():
    assert len(examples()) > 40
