"""Trains several runs, each in a process of its own, so many at once."""

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
    """Train all runs, so many at once; go on after failures.

    `train` gets a run, its place as `[1/4]`, and what says when to stop; it returns a sentence if the run failed.
    """
    failures: list[str] = []
    with StopRequest() as stop, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(train, run, f"[{n}/{len(runs)}]", stop) for n, run in enumerate(runs, start=1)]
        try:
            failures += [failure for future in as_completed(futures) if (failure := future.result())]
        except KeyboardInterrupt:  # the second one: threads cannot be interrupted, so end as a process without them
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
    return Ended(tuple(failures), stop.signal)


def threads_of(processes: int, jobs: int) -> dict[str, str]:
    """Return the environment in which the processes of several runs share the cores; one run finds its own way."""
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs // processes))}
