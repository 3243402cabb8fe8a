"""How a command ends: with its code, once all that others do at the end is done, without taking Python apart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time
atexit.register(print, "an earlier handler")
from cdp_repro.cli.entry import end_with

class Kept:
    def __del__(self):
        print("taken apart")

def main():
    atexit.register(print, "an exit handler")
    threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
    sys.stdout.write("the command\\n")
    {ends}

kept = Kept()
end_with(main)
"""


ENDS = ["the command", "a thread", "an exit handler", "an earlier handler"]


def run(ends: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT.format(ends=ends)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [0, 3])
def test_threads_and_exit_handlers_end_before_the_process_does(code):
    done = run(f"return {code}")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines() == ENDS


def test_a_defect_ends_python_as_it_always_does():
    done = run("raise KeyError('lost')")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "the command",
        "a thread",
        "an exit handler",
        "an earlier handler",
        "taken apart",
    ]
    assert done.stderr.endswith("KeyError: 'lost'\n")


@pytest.mark.parametrize("way", ["runpy.run_module('cdp_repro.cli.plan', run_name='__main__')", "entry.plan()"])
def test_a_program_that_calls_a_command_goes_on_and_has_its_own_exit_code(way):
    script = f"""
import runpy, sys
from cdp_repro.cli import entry

def program():
    sys.argv = ["cdp-plan", "--help"]
    try:
        {way}
    except SystemExit as ended:
        print("ended with", ended.code)
    sys.exit(7)

exec("program()", {{"__name__": "another", "program": program}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "") and done.stdout.endswith("ended with 0\n")


def test_a_profiler_shows_what_it_has_seen(tmp_path):
    command = [sys.executable, "-m", "cProfile", "-m", "cdp_repro.cli.plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "cumtime" in done.stdout


IGNORING = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == os.environ["AT"] and not vars(Interrupting).get("done"):
            Interrupting.done = True
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""
"""A sitecustomize.py: Ctrl-C at the import of a module."""


@pytest.mark.parametrize("module", ["numpy._core._exceptions", "torch._utils_internal", "cdp_repro.training.trainer"])
def test_ctrl_c_in_an_import_ends_a_command_quietly(tmp_path, module):
    """torch imports numpy from C, which takes the exception for a missing numpy and goes on with half of it."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", "from cdp_repro.cli import entry; entry.train()", "model=mlp", "wandb=disabled"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "AT": module}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_an_interrupt_that_is_ignored_stays_ignored(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(IGNORING + INTERRUPTING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", "from cdp_repro.cli import entry; entry.plan()", "--help"], capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "AT": "cdp_repro.cli.plan"}, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: cdp-plan")


def test_memory_that_is_missing_is_told_where_torch_is_not_imported():
    script = """
import sys
from cdp_repro.cli.console import exit_code_of
with exit_code_of() as result:
    raise MemoryError("of a plan")
print(result.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n" and done.stderr.startswith("error: not enough memory: of a plan\n")


def test_little_is_imported_before_a_command_can_tell_that_it_was_interrupted():
    script = "import sys, cdp_repro.cli.entry; print(*(name for name in sys.modules if 'cdp_repro' in name))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[1] for name in found if "." in name} == {"cli", "launch"} and len(found) < 12
