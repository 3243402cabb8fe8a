"""Ranks as processes that are started here, watched, and ended together.

torch's `elastic_launch` would be the library for it, but (torch 2.15, measured) it waits 30 s for a stopped process
before it kills it, whatever its `shutdown_timeout` says; it answers the first SIGTERM by ending itself, so that what
the ranks return or raise after their checkpoint is lost; and it carries no exception over. `torch.multiprocessing`
shares the first of these and keeps only the text of a traceback. So the ranks are plain `multiprocessing` processes;
the rendezvous is torch's own: a store in this process, at a port that the kernel chose, so that no runs race for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cdp_repro.launch.environment import environment
from cdp_repro.launch.failures import Failure, StalledError, error_to_raise
from cdp_repro.launch.folders import temporary_folder
from cdp_repro.launch.in_rank import run_rank
from cdp_repro.launch.positions import Positions
from cdp_repro.launch.signals import STOP_SIGNALS, StopRequest

_POLL_SECONDS = 0.1


def launch_here(function: Callable[..., Any], arguments: Sequence[Any], processes: int, grace_seconds: float) -> Any:
    """Start the ranks and wait for all of them; return the value of rank 0, or raise the first failure."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: what the ranks import is their affair

    server = socket.create_server(("127.0.0.1", 0))  # the store's own socket would listen on all interfaces
    port = server.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    ranks: list[_Rank] = []
    stalled: StalledError | None = None
    with temporary_folder() as folder:
        with StopRequest() as stop:
            try:
                for rank in _started(function, arguments, processes, folder, store.port):
                    ranks.append(rank)
                failures, late = _watch(ranks, stop, grace_seconds)
                if late and stop.signal is not None:
                    stalled = _stalled(late, stop.signal, grace_seconds, Positions(store, processes, None))
            finally:
                _kill(ranks)
        if not failures and not late:
            return pickle.loads(ranks[0].value_path.read_bytes())
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.seconds), default=None)
    if stalled is not None and (first is None or first.lost_peer):
        raise stalled
    assert first is not None, "ranks have a deadline only after a failure or a signal"
    if first.signal is not None and first.signal == stop.signal:
        signal.raise_signal(first.signal)  # it was meant for this process and ended the ranks: so it ends this one
    raise error_to_raise(first, failures)


def _started(
    function: Callable[..., Any], arguments: Sequence[Any], processes: int, folder: Path, port: int
) -> Iterator[_Rank]:
    """Start the ranks, in an environment as torchrun makes it.

    Signals wait until a rank is ready for them: a Ctrl-C would else show the traceback of half an import.
    """
    context = get_context("spawn")
    with environment({"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}):  # of locks that killed ranks leave
        resource_tracker.ensure_running()  # a start would do it, and unblock the signals
    for number in range(processes):
        process = context.Process(target=run_rank, args=(number, function, arguments, folder))
        with environment(_variables(number, processes, port)), _blocked_signals():
            process.start()
        yield _Rank(number, process, folder)


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process; rank 0 is a client as well
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes))),
    }


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _watch(ranks: Sequence[_Rank], stop: StopRequest, grace_seconds: float) -> tuple[list[Failure], list[int]]:
    """Wait for all ranks, passing a signal on; after it, or once one has failed, wait no longer than the grace.

    Returns the failures, and the numbers of the ranks that still run.
    """
    failures: dict[int, Failure] = {}
    passed_on = False
    deadline = float("inf")
    while True:
        running = [rank for rank in ranks if rank.process.is_alive()]
        for rank in ranks:
            if rank.number not in failures and (failure := rank.failure()):
                failures[rank.number] = failure
                deadline = min(deadline, time.monotonic() + grace_seconds)
        if not running or time.monotonic() > deadline:
            return list(failures.values()), [rank.number for rank in running]
        if stop.signal is not None and not passed_on:
            _send(running, stop.signal)
            passed_on = True
            deadline = min(deadline, time.monotonic() + grace_seconds)
        wait([rank.process.sentinel for rank in running], timeout=_POLL_SECONDS)


def _stalled(late: Sequence[int], number: int, grace_seconds: float, positions: Positions) -> StalledError:
    """Return the error that says which ranks had not ended after a signal."""
    those = ", ".join(map(str, late))
    name = signal.Signals(number).name
    cause = (
        f"of {positions.ranks} ranks {those} had not ended {grace_seconds:g} s after {name}, and were killed "
        "(grace_seconds= gives them longer)"
    )
    return StalledError(late, cause, positions.report(), number)


def _send(ranks: Sequence[_Rank], number: int) -> None:
    for rank in ranks:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, number)


def _kill(ranks: Sequence[_Rank]) -> None:
    """Kill the ranks that still run, stopped ones as well."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join(timeout=5)  # for ever, were a driver not to let go of it


@dataclass(frozen=True)
class _Rank:
    """A process, and the two files of which it leaves one: its value or its failure."""

    number: int
    process: BaseProcess
    folder: Path

    @property
    def value_path(self) -> Path:
        return self.folder / f"{self.number}.value"

    @property
    def failure_path(self) -> Path:
        return self.folder / f"{self.number}.failure"

    def failure(self) -> Failure | None:
        """Return how the rank failed, if by now it has."""
        code = self.process.exitcode
        if self.failure_path.exists():
            failure = pickle.loads(self.failure_path.read_bytes())
            assert isinstance(failure, Failure)
            return failure
        if code is None or (code == 0 and self.value_path.exists()):
            return None
        return Failure(self.number, time.monotonic(), exit_code=code)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting in the body and, until they unblock them, in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
