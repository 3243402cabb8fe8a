"""What --help gives as examples can be typed."""

from __future__ import annotations

import re
import shlex
from importlib import import_module

import pytest

from cdp_repro.config.compose import compose_config, expand_sweep

COMMANDS = ("train", "plan", "verify", "export")
ELSEWHERE = ("resume=", "restart=", "launcher.", "launcher=", "program=FILE", "model.weights=")
"""Beginnings of words that need a run or a file, or are about many runs."""


def examples() -> list[str]:
    texts = [import_module(f"cdp_repro.cli.{name}").USAGE for name in COMMANDS]
    lines = [line for text in texts for line in re.findall(r"^  (cdp-(?:train|plan|verify) .*)$", text, re.MULTILINE)]
    return [re.split(r"\s{2,}", line)[0] for line in lines]


@pytest.mark.parametrize("example", examples())
def test_examples_can_be_typed(example):
    words = [word for word in shlex.split(example)[1:] if not word.startswith(("-", *ELSEWHERE))]
    for cell in expand_sweep(words):
        compose_config(cell, check_device=False)


def test_there_are_examples():
    assert len(examples()) > 15
