"""The scripts answer a wrong word as the commands do: one message, exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name, *arguments):
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        (
            "bench",
            ["overhed"],
            "unknown bench 'overhed': choose overhead, methods, programs, memory, placements, pipelines, servers, "
            "links_resnet18, links_vit",
        ),
        ("bench", ["overhed"], "did you mean 'overhead'?"),
        ("simulate", ["eight"], "N=eight: give whole numbers of workers, 2 or more, e.g. 8"),
        ("simulate", ["0"], "N=0: give whole numbers of workers, 2 or more, e.g. 8"),
        ("docs", [str(SCRIPTS / "docs.py")], "docs.py is a file: give a folder"),
        ("docs", ["a", "b"], "one folder is wanted, not 2: a b"),
        ("docs", ["--folder"], "unknown option --folder: see --help"),
        ("readme", ["/no/such/folder"], "there is no folder /no/such/folder: make it, or leave it out"),
        ("accuracy", ["cifar11"], "unknown study 'cifar11': choose"),
    ],
)
def test_a_wrong_word_is_named(name, arguments, told):
    done = script(name, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert told in done.stderr and done.stderr.startswith("error: ")


@pytest.mark.parametrize("name", ["bench", "simulate", "docs", "readme"])
def test_help_is_their_documentation(name):
    done = script(name, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"Usage: python scripts/{name}.py" in done.stdout
