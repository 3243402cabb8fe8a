"""How a command ends: with its code, once all that others do at the end is done, without taking Python apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time
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


def run(ends: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT.format(ends=ends)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [0, 3])
def test_threads_and_exit_handlers_end_before_the_process_does(code):
    done = run(f"return {code}")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines() == ["the command", "a thread", "an exit handler"]


def test_a_defect_ends_python_as_it_always_does():
    done = run("raise KeyError('lost')")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["the command", "a thread", "an exit handler", "taken apart"]
    assert done.stderr.endswith("KeyError: 'lost'\n")
