"""The scripts answer a wrong word as the commands do: one message, exit code 2."""

from __future__ import annotations

import json
import re
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
        ("docs", ["/dev/null/x"], "cannot make the folder /dev/null/x: Not a directory: give another one"),
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


@pytest.mark.parametrize(
    ("action", "content", "told"),
    [
        ("record", None, r"cannot write to \S+: No such file or directory"),
        ("compare", None, r"cannot read \S+: No such file or directory"),
        ("compare", "{}", r"is not a file of `record`: write one by"),
        ("compare", "[]", r"is not a file of `record`"),
        ("compare", "x", r"is not a file of `record`"),
    ],
)
def test_trajectories_says_what_is_wrong_with_a_file_before_it_trains(script, tmp_path, action, content, told):
    path = tmp_path / ("there.json" if content else "no/folder.json")
    if content:
        path.write_text(content)
    code, out, _ = script("trajectories", action, str(path), "cdp_v2")
    assert re.search(told, code) and out == ""


def test_trajectories_are_recorded_and_found_again(script, tmp_path):
    path, words = str(tmp_path / "there.json"), ("cdp_v2", "single_device", "N=2", "S=2", "R=1", "paper")
    code, out, _ = script("trajectories", "record", path, *words)
    assert code == 0 and re.search(r"^[1-9]\d* settings recorded, 0 failed$", out, re.MULTILINE), out
    code, out, _ = script("trajectories", "compare", path, *words)
    assert code == 0 and re.search(r"^[1-9]\d* settings bitwise the same$", out, re.MULTILINE), out
    recorded = json.loads(Path(path).read_text())
    changed = next(iter(recorded["settings"].values()))
    changed["losses"][0][0] = "0x0p+0"
    Path(path).write_text(json.dumps(recorded))
    code, out, _ = script("trajectories", "compare", path, *words)
    assert code == 1 and "1 settings differ, " in out and "losses differ from step 0 on" in out
