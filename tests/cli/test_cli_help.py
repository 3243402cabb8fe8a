"""What --help and the documents give as examples can be typed."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cdp_repro.config import compose
from cdp_repro.config.compose import compose_config
from cdp_repro.config.source import OURS
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


def cells(example):
    """Return the overrides of each run of a command line."""
    words = [word for word in shlex.split(example)[1:] if "=" in word and not word.startswith(("-", *ELSEWHERE))]
    return expand_sweep(words)


@pytest.mark.parametrize("example", examples())
def test_examples_can_be_typed(example):
    for cell in cells(example):
        compose_config(cell, check_device=False)


def test_values_that_are_set_in_a_tree_of_choices_are_those_that_hydra_composes():
    of_examples = [cell for example in examples() for cell in cells(example)]
    of_each_keys = {tuple(text.partition("=")[0] for text in cell): cell for cell in of_examples}
    plain = [
        ["speeds=[1,2,1.5]", "workers=3", "run_dir='a b, c'", "wandb_project=two words"],
        ["mode=[[1,1],[1,0]]", "workers=2", "optim.lr=1e-3", "optim.clip_norm=null", "seed=7", "seed=8"],
        ["run_dir=${mode.name}-${seed}", "seed=3", "model=mlp", "model.hidden=16", "collectives=True", "optim=adamw"],
        ["optim.lr='0.1'", "workers=two", "stages=null", "cluster.forward_seconds=[.1,1e-2]"],
    ]
    for cell in (*plain, *of_each_keys.values()):
        composable, _, tree = compose._examined(cell, OURS)
        expected = compose._composed(composable, OURS)
        assert tree is not None or cell not in plain, "no second composition is needed"
        assert tree is None or OmegaConf.to_container(tree) == OmegaConf.to_container(expected), cell


def test_there_are_examples():
    assert len(examples()) > 40


@pytest.mark.parametrize("name", [*COMMANDS, "report"])
def test_help_fits_a_terminal_that_nobody_has_widened(name, capsys):
    assert import_module(f"cdp_repro.cli.{name}").main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
