"""What `cdp-train --status` shows: each cell of a sweep, its state, how far it is, and how it failed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import COMMAND, RunDirectory, RunDirectoryError
from cdp_repro.observe.text import table
from cdp_repro.studies.cells import read_list
from cdp_repro.studies.locked_log import log_path
from cdp_repro.studies.status import run_state

_RESUMED = re.compile(r"resumed at training step (\d+)")
_ENDED_BADLY = ("failed", "diverged", "damaged", "interrupted", "stopped")


def sweep_text(root: Path) -> str:
    """Return a table of all cells of a sweep, and a line with the number of each state.

    Raises:
        ConfigError: the folder is not of a sweep, or of another version.
    """
    noted = read_list(root)
    queue = _queue(noted.arrays)
    lines: list[Sequence[str]] = [("run", "state", "step", "steps/s", "left", "said last")]
    states: Counter[str] = Counter()
    for name, epochs in noted.epochs.items():
        directory, outputs = root / name, noted.job_outputs(root, name)
        state = _state(directory, queue.get(name, ""), outputs)
        states[state] += 1
        pace = _pace(directory, epochs)
        shown = pace.texts(state) if pace else ("-", "", "")
        said = _said([*outputs, log_path(directory)]) if state in _ENDED_BADLY else ""
        lines.append((name, state, *shown, said))
    counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
    return f"{table(lines)}\n\n{states.total()} runs: {counts}\n"


def _state(directory: Path, in_queue: str, outputs: Sequence[Path]) -> str:
    """Return the state of a run by its files and by what SLURM says of its job."""
    state = run_state(directory, None, outputs)
    if state in ("finished", "diverged"):
        return state
    if in_queue in ("RUNNING", "COMPLETING"):  # on another node, whose locks are not seen here
        return "running"
    return "queued" if in_queue else state


def _queue(arrays: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return what SLURM says of each cell that is in its queue, by name."""
    if not arrays or shutil.which("squeue") is None:
        return {}
    asked = ["squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={','.join(arrays)}"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    found = {}
    for array, index, state in re.findall(r"^(\d+)_(\d+) (\w+)$", answer, re.MULTILINE):
        found[arrays[array][int(index)]] = state
    return found


@dataclass(frozen=True)
class _Pace:
    """How far a run is, and how fast it has been since it was started or resumed."""

    step: int
    steps: int | None
    """Of the whole run; None before the end of the first epoch."""
    per_second: float | None

    def texts(self, state: str) -> tuple[str, str, str]:
        """Return step, rate and time left, the last two only while the run goes on."""
        step = f"{self.step} of {self.steps}" if self.steps else str(self.step)
        if state != "running" or not self.per_second:
            return step, "", ""
        left = _time((self.steps - self.step) / self.per_second) if self.steps else ""
        return step, f"{self.per_second:.3g}", left


def _time(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes} min" if minutes else "< 1 min"


def _pace(directory: Path, epochs: int) -> _Pace | None:
    """Return the pace of a run; None before its first logged step."""
    run = RunDirectory(directory)
    try:
        metrics = read_metrics(run.metrics_path)
        begun, logged = (directory / COMMAND).stat().st_mtime, run.metrics_path.stat().st_mtime
        resumed = _RESUMED.findall(run.log_path(0).read_text())
        ended = run.summary().get("step", 0)
    except (FileNotFoundError, RunDirectoryError):
        return None
    if not metrics:
        return None
    last, over = metrics[-1]["step"], [row["step"] for row in metrics if "train/epoch_loss" in row]
    step = max(last, ended)  # a run that was stopped may have gone on after its last row
    done, seconds = last - (int(resumed[-1]) if resumed else 0), logged - begun
    return _Pace(step, over[0] * epochs if over else None, done / seconds if done > 0 and seconds > 0 else None)


def _said(outputs: Sequence[Path]) -> str:
    """Return the last line of the first file that has one; a folder in the place of a file is told."""
    for path in outputs:
        if path.is_dir():
            return f"{path} is a folder, expected a file: move it away"
        if path.exists() and (lines := path.read_text(errors="replace").strip().splitlines()):
            return lines[-1].strip()
    return ""
