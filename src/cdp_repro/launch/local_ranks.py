"""Ranks as processes that are started here, watched, and ended together.

torch's `elastic_launch` is the library for this, but it has three faults (torch 2.15, measured). It waits 30 s before
it kills a stopped process, whatever its `shutdown_timeout` says. It answers the first SIGTERM by ending itself, so that
what the ranks return or raise after their checkpoint is lost. It carries no exception over. `torch.multiprocessing`
shares the first fault and keeps only the text of a traceback. So the ranks are plain `multiprocessing` processes, which
`fork_server` starts. The rendezvous is torch's own: a store in that server, at a port that the kernel chose for this
process, so that runs do not race for it. No torch is imported here, unless ranks stall.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdp_repro.launch.environment import usable_cores
from cdp_repro.launch.failures import Failure, StalledError, error_to_raise
from cdp_repro.launch.folders import temporary_folder
from cdp_repro.launch.fork_server import ForkedRanks, store_at
from cdp_repro.launch.in_rank import failure_path, run_rank, value_path
from cdp_repro.launch.positions import Positions
from cdp_repro.launch.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_SECONDS = 0.1


def launch_here(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    processes: int,
    grace_seconds: float,
    imports: Sequence[str],
) -> Any:
    """Start the ranks and wait for all of them; return the value of rank 0, or raise the first failure."""
    listener = socket.create_server(("127.0.0.1", 0))  # the store's own socket would listen on all interfaces
    port = listener.getsockname()[1]
    stalled: StalledError | None = None
    with temporary_folder() as folder:
        with StopRequest() as stop:
            ranks = ForkedRanks(
                run_rank,
                (function, arguments, folder),
                _variables(processes, port),
                [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)],
                imports,
                listener,
            )
            try:
                failures, late = _watch(ranks, folder, stop, grace_seconds)
                has_begun = ranks.have_started
                if late and has_begun and stop.signal is not None:
                    positions = Positions(_store_of(port), processes, None)
                    stalled = _stalled(late, stop.signal, grace_seconds, positions)
            finally:
                ranks.end()
        if not failures and not late:
            return pickle.loads(value_path(folder, 0).read_bytes())
    if stop.signal is not None and not has_begun:
        signal.raise_signal(stop.signal)  # it ends this process as it would have without ranks
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.seconds), default=None)
    if stalled is not None and (first is None or first.lost_peer):
        raise stalled
    assert first is not None, "ranks have a deadline only after a failure or a signal"
    if first.signal is not None and first.signal == stop.signal:
        signal.raise_signal(first.signal)  # meant for this process, it ended the ranks: so it ends this one, too
    raise error_to_raise(first, failures)


def _variables(processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets, except for a rank's own numbers."""
    return {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in their server; rank 0 is a client as well
        "TORCHELASTIC_RESTART_COUNT": "0",
        # else ranks whose starter is killed print hundreds of lines of C++ before they end: its store is gone
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // processes))),
    }


def _watch(
    ranks: ForkedRanks, folder: Path, stop: StopRequest, grace_seconds: float
) -> tuple[list[Failure], list[int]]:
    """Wait for all ranks and pass a signal on; after a signal or a failure, wait at most `grace_seconds`.

    Returns the failures, and the numbers of the ranks that still run. Before the ranks have started, a signal ends the
    waiting at once: they have nothing to save.
    """
    failures: dict[int, Failure] = {}
    passed_on = False
    deadline = float("inf")
    while True:
        for rank in ranks.numbers:
            if rank not in failures and (failure := _failure(rank, folder, ranks.exit_codes.get(rank))):
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + grace_seconds)
        if not ranks.running or time.monotonic() > deadline:
            return list(failures.values()), ranks.running
        if stop.signal is not None:
            if not ranks.have_started:
                return [], ranks.running
            deadline = min(deadline, time.monotonic() + grace_seconds)
            passed_on = passed_on or ranks.send(stop.signal)
        ranks.wait(_POLL_SECONDS)


def _failure(rank: int, folder: Path, exit_code: int | None) -> Failure | None:
    """Return the failure of a rank, if it has failed by now."""
    path = failure_path(folder, rank)
    if path.exists():
        failure = pickle.loads(path.read_bytes())
        assert isinstance(failure, Failure)
        return failure
    if exit_code is None or (exit_code == 0 and value_path(folder, rank).exists()):
        return None
    return Failure(rank, time.monotonic(), exit_code=exit_code)


def _store_of(port: int) -> Store | None:
    """Return the store at which the ranks meet; None if it is not there yet, or gone."""
    with suppress(RuntimeError):
        return store_at(port)
    return None


def _stalled(late: Sequence[int], number: int, grace_seconds: float, positions: Positions) -> StalledError:
    """Return the error that says which ranks had not ended after a signal."""
    those = ", ".join(map(str, late))
    name = signal.Signals(number).name
    cause = (
        f"of {positions.ranks} ranks {those} had not ended {grace_seconds:g} s after {name}, and were killed "
        "(grace_seconds= gives them longer)"
    )
    return StalledError(late, cause, positions.report(), number)
