"""A rank that stalls in `cdp-train`: who is named, in how many lines, and that all ends in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kill import rank_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the processes of the ranks")
LONG = 90.0


def stop_a_rank(run: Path, *settings: str) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Train; stop rank 1 after a checkpoint; return the launching process and those of the ranks."""
    command = [sys.executable, "-m", "cdp_repro.cli.train", *TINY, "workers=2", "epochs=4000", f"run_dir={run}"]
    command += ["checkpoint_every_steps=4", *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LONG
    while not list((run / "checkpoints").glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    ranks = rank_processes(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    return process, ranks


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def ended(process: subprocess.Popen[str], ranks: dict[int, int]) -> list[str]:
    """Return the lines that the launching process tells, from the error on; all ranks have ended."""
    try:
        shown = process.communicate(timeout=LONG)[1].splitlines()
    finally:
        process.kill()
    assert not any(map(is_running, ranks.values()))
    (first,) = [number for number, line in enumerate(shown) if line.startswith("error:")]
    return shown[first:]


def check_way_on(lines: list[str], run: Path) -> None:
    newest = max(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert lines == [
        f"newest checkpoint: {newest}", f"go on with: cdp-train resume={run}", f"tracebacks: {run}/logs"
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["placement=replicated", "placement=pipeline", "mode=dp baseline=ddp"])
def test_the_rank_that_stalls_is_named_in_a_few_lines(tmp_path, what):
    run = tmp_path / "run"
    process, ranks = stop_a_rank(run, *what.split(), "timeout_seconds=10", "grace_seconds=1")
    cause, *where = ended(process, ranks)
    assert process.returncode == 1
    assert cause == "error: rank 1 stalls: the others have waited for timeout_seconds in vain"
    assert re.fullmatch(r"  rank 0 began .*; it has waited in vain", where[0])
    assert re.fullmatch(r"  rank 1 began [^;]*", where[1])
    check_way_on(where[2:], run)
    assert "Traceback" in (run / "logs" / "rank0.log").read_text()


def test_a_signal_ends_a_run_that_hangs_in_the_grace(tmp_path):
    run = tmp_path / "run"
    process, ranks = stop_a_rank(run, "placement=replicated", "grace_seconds=2")
    process.terminate()
    begin = time.monotonic()
    cause, *where = ended(process, ranks)
    assert time.monotonic() - begin < 30
    assert process.returncode == 128 + signal.SIGTERM
    assert cause.startswith("error: of 2 ranks 0, 1 had not ended 2 s after SIGTERM, and were killed (grace_seconds=")
    assert [line[:14] for line in where[:2]] == ["  rank 0 began", "  rank 1 began"]
    check_way_on(where[2:], run)
