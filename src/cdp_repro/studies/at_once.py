"""Trains several runs, each in a process of its own, a given number at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

from cdp_repro.launch.environment import usable_cores
from cdp_repro.launch.signals import StopRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How runs have ended."""

    failures: tuple[str, ...]
    """A sentence for each that failed."""
    signal: int | None
    """The signal that stopped all, if one did."""


def train_at_once(runs: Sequence[T], jobs: int, train: Callable[[T, str, StopRequest], str | None]) -> Ended:
    """Train all runs, `jobs` at once; go on after failures.

    `train` gets a run, its place, such as `[1/4]`, and the stop request; it returns a sentence if the run failed.
    """
    failures: list[str] = []
    with StopRequest() as stop, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(train, run, f"[{n}/{len(runs)}]", stop) for n, run in enumerate(runs, start=1)]
        try:
            failures += [failure for future in as_completed(futures) if (failure := future.result())]
        except KeyboardInterrupt:  # the second SIGINT: threads cannot be interrupted, so end as a process without them
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
    return Ended(tuple(failures), stop.signal)


def threads_of(processes: int, jobs: int) -> dict[str, str]:
    """Return variables by which the processes of several runs share the cores; a single run needs none."""
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs // processes))}
