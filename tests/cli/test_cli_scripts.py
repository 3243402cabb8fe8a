"""The scripts answer a wrong word as the commands do: one message, exit code 2."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script in this process, which has imported torch already; return exit code, stdout and stderr."""

    def run(name, *arguments):
        path = str(SCRIPTS / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        monkeypatch.syspath_prepend(SCRIPTS)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        (
            "bench",
            ["overhed"],
            "unknown bench 'overhed': choose overhead, methods, programs, placements, pipelines, servers, "
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
def test_a_wrong_word_is_named(script, name, arguments, told):
    code, out, error = script(name, *arguments)
    assert code == 2 and out == ""
    assert told in error and error.startswith("error: ")


@pytest.mark.parametrize("name", ["bench", "simulate", "docs", "readme"])
def test_help_is_their_documentation(script, name):
    code, out, error = script(name, "--help")
    assert code == 0 and error == ""
    assert f"Usage: python scripts/{name}.py" in out


def test_a_script_is_a_command():
    command = [sys.executable, str(SCRIPTS / "simulate.py"), "eight"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: N=eight: ")
