"""Runs a function in several ranks: processes of its own on this machine, or those that torchrun or srun has started.

torch's `elastic_launch` would be the library for it, but (torch 2.15, measured) it waits 30 s for a stopped process
before it kills it, whatever its `shutdown_timeout` says; it answers the first SIGTERM by ending itself, so that what
the ranks return or raise after their checkpoint is lost; and it carries no exception over. `torch.multiprocessing`
shares the first of these and keeps only the text of a traceback. So the ranks are plain `multiprocessing` processes;
the rendezvous is torch's own: a store in this process, at a port that the kernel chose, so that no runs race for it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cdp_repro.training.signals import StopRequest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class LaunchError(ValueError):
    """The user's mistake in how the processes were started."""


class RankFailedError(RuntimeError):
    """A rank has failed, and all others have been ended.

    Attributes:
        rank: The one that failed first.
        exit_code: With which it ended; None if a signal killed it.
        signal_name: The signal that killed it, if one did.
        traceback: What it raised, if it did.
    """

    def __init__(self, rank: int, exit_code: int | None, signal_name: str | None, traceback: str) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.traceback = traceback
        if traceback:
            super().__init__(f"rank {rank} failed:\n{traceback.rstrip()}")
        elif signal_name:
            memory = " (so ends, too, what asks for more memory than there is)" if signal_name == "SIGKILL" else ""
            super().__init__(f"rank {rank} was killed by {signal_name}{memory}")
        else:
            super().__init__(f"rank {rank} ended with exit code {exit_code} before it returned")


def launch(function: Callable[..., Any], arguments: Sequence[Any], processes: int, grace_seconds: float = 15.0) -> Any:
    """Run `function(*arguments)` in every one of `processes` ranks.

    Under torchrun or srun this process is one of the ranks and runs it itself, as it does if there is but one.
    Otherwise the ranks are started here. SIGINT and SIGTERM are then passed on to them, once, and they end as they see
    fit; a second SIGINT ends them. No rank outlives this process.

    Args:
        function: Of a module's top level.
        arguments: What pickles.
        processes: The number of ranks.
        grace_seconds: For how long the other ranks may go on after one has failed; then they are killed.

    Returns:
        What rank 0 returned; under torchrun or srun what this rank returned.

    Raises:
        LaunchError: torchrun or srun has started another number of processes.
        RankFailedError: A rank has failed. The caller's own exceptions (those of its package and of this one),
            KeyboardInterrupt and SystemExit are raised as they are instead, by preference those of rank 0.
    """
    started = _variables_of_starter(os.environ)
    if started is not None:
        _check_world_size(started, processes)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _die_with_parent()  # else a rank goes on without a torchrun that was killed
        with _environment(started):
            return function(*arguments)
    if processes == 1:
        return function(*arguments)
    return _launch_here(function, arguments, processes, grace_seconds)


# Ranks that torchrun or srun has started


def _variables_of_starter(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return this rank's variables for torch.distributed if torchrun or srun has set some, else None."""
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        return {name: environ[name] for name in ("RANK", "WORLD_SIZE")}
    # A batch script has the first two as well, but runs once; only srun sets the node list of a step.
    by_srun = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"} <= environ.keys()
    if by_srun and int(environ["SLURM_NTASKS"]) > 1:
        job, step = (int(environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return {
            "RANK": environ["SLURM_PROCID"],
            "LOCAL_RANK": "0" if _has_own_gpu(environ) else environ.get("SLURM_LOCALID", "0"),  # it chooses the GPU
            "WORLD_SIZE": environ["SLURM_NTASKS"],
            "MASTER_ADDR": environ.get("MASTER_ADDR", _first_host(environ["SLURM_STEP_NODELIST"])),
            "MASTER_PORT": environ.get("MASTER_PORT", str(20_000 + (8 * job + step) % 12_000)),  # below ephemeral ones
        }
    return None


def _has_own_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM shows this task but one of several GPUs, as it does for `--gpus-per-task=1`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible != "" and "," not in visible and int(environ.get("SLURM_GPUS_ON_NODE", 0)) > 1


def _first_host(node_list: str) -> str:
    """Return the first host of a list such as `gpu[01-03,7],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={node_list} names no host: set MASTER_ADDR to that of rank 0")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _check_world_size(started: Mapping[str, str], processes: int) -> None:
    if int(started["WORLD_SIZE"]) == processes:
        return
    if "RANK" in os.environ:
        counted = "WORLD_SIZE"
        works = (
            f"torchrun --nproc-per-node={processes} {shlex.join(['-m', 'cdp_repro.cli.train', *sys.argv[1:]])}\n"
            "or unset RANK and WORLD_SIZE, and the processes are started here"
        )
    else:
        counted = "SLURM_NTASKS"
        works = f"srun --ntasks={processes} {shlex.join(sys.orig_argv)}"
    raise LaunchError(
        f"{started['WORLD_SIZE']} processes have been started ({counted}), but the run needs {processes}: use\n{works}"
    )


# Ranks that are started here


@dataclass(frozen=True)
class _Rank:
    """A process and where it leaves its outcome: one of two files."""

    number: int
    process: BaseProcess
    folder: Path

    @property
    def value_path(self) -> Path:
        return self.folder / f"{self.number}.value"

    @property
    def failure_path(self) -> Path:
        return self.folder / f"{self.number}.failure"

    def failure(self) -> _Failure | None:
        """Return how the rank failed, if by now it has."""
        code = self.process.exitcode
        if self.failure_path.exists():
            failure = pickle.loads(self.failure_path.read_bytes())
            assert isinstance(failure, _Failure)
            return failure
        if code is None or (code == 0 and self.value_path.exists()):
            return None
        return _Failure(self.number, time.monotonic(), exit_code=code)


@dataclass(frozen=True)
class _Failure:
    """How a rank failed: what it raised or, if it had no time to say so, its exit code."""

    rank: int
    seconds: float  # on the monotonic clock, which processes share
    exit_code: int | None = None
    traceback: str = ""
    pickled_error: bytes | None = None  # of the caller's own exceptions
    lost_peer: bool = False  # probably a consequence of another rank's failure

    @property
    def signal(self) -> int | None:
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def error(self) -> BaseException | None:
        if self.pickled_error is None:
            return None
        kind, arguments, state = pickle.loads(self.pickled_error)
        return _rebuilt(kind, arguments, state)

    def as_error(self) -> RankFailedError:
        if self.signal is None:
            return RankFailedError(self.rank, self.exit_code, None, self.traceback)
        try:
            name = signal.Signals(self.signal).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {self.signal}"
        return RankFailedError(self.rank, None, name, self.traceback)


def _launch_here(function: Callable[..., Any], arguments: Sequence[Any], processes: int, grace_seconds: float) -> Any:
    """Start the ranks, wait for all of them, and return what rank 0 returned or raise what went wrong first."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: what the ranks import is their affair

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    with TemporaryDirectory(prefix="cdp-repro-") as name:
        with StopRequest() as stop:
            try:
                for rank in _started(function, arguments, processes, Path(name), store.port):
                    ranks.append(rank)
                failures = _watch(ranks, stop, grace_seconds)
            finally:
                _kill(ranks)
        if not failures:
            return pickle.loads(ranks[0].value_path.read_bytes())
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.seconds))
    if first.signal is not None and first.signal == stop.signal:
        signal.raise_signal(first.signal)  # it was meant for this process and ended the ranks: so it ends this one
    raise _what_to_raise(first, failures)


def _started(
    function: Callable[..., Any], arguments: Sequence[Any], processes: int, folder: Path, port: int
) -> Iterator[_Rank]:
    """Start the ranks, in an environment as torchrun makes it.

    Signals wait until a rank is ready for them: a Ctrl-C would else show the traceback of half an import.
    """
    context = get_context("spawn")
    resource_tracker.ensure_running()  # a start would do it, and unblock the signals
    for number in range(processes):
        process = context.Process(target=_run_rank, args=(number, function, arguments, folder))
        with _environment(_variables(number, processes, port)), _blocked_signals():
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
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0, too, is a client of the store in the launching process
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes))),
    }


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _watch(ranks: Sequence[_Rank], stop: StopRequest, grace_seconds: float) -> list[_Failure]:
    """Wait for all ranks, passing a signal on; once one has failed, wait no longer than the grace."""
    failures: dict[int, _Failure] = {}
    passed_on = False
    deadline = float("inf")
    while True:
        running = [rank for rank in ranks if rank.process.is_alive()]
        for rank in ranks:
            if rank.number not in failures and (failure := rank.failure()):
                failures[rank.number] = failure
                deadline = min(deadline, time.monotonic() + grace_seconds)
        if not running or time.monotonic() > deadline:
            return list(failures.values())
        if stop.signal is not None and not passed_on:
            _send(running, stop.signal)
            passed_on = True
        wait([rank.process.sentinel for rank in running], timeout=_POLL_SECONDS)


def _send(ranks: Sequence[_Rank], number: int) -> None:
    for rank in ranks:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, number)


def _kill(ranks: Sequence[_Rank]) -> None:
    """End the ranks that still run, stopped ones, too."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join(timeout=5)  # for ever, were a driver not to let go of it


def _what_to_raise(first: _Failure, failures: Sequence[_Failure]) -> BaseException:
    """Return the exception of the first failure or, if rank 0 raised one of its kind, that."""
    error = first.error
    if error is None:
        return first.as_error()
    errors = [failure.error for failure in sorted(failures, key=lambda failure: failure.rank)]
    return next(other for other in errors if type(other) is type(error))


# In a rank


def _run_rank(number: int, function: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> None:
    """Run the function and leave its value or its failure in a file, which a kill in its midst does not leave half."""
    os.setpgid(0, 0)  # Ctrl-C reaches the launching process only, which passes it on: twice would end the rank
    _die_with_parent()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        value = function(*arguments)
        outcome, suffix = pickle.dumps(value if number == 0 else None), "value"
    except BaseException as error:
        outcome, suffix = pickle.dumps(_failure_of(number, error, function)), "failure"
    partial = folder / f"{number}.partial"
    partial.write_bytes(outcome)
    partial.replace(folder / f"{number}.{suffix}")
    sys.exit(suffix == "failure")


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _failure_of(rank: int, error: BaseException, function: Callable[..., Any]) -> _Failure:
    return _Failure(
        rank,
        time.monotonic(),
        exit_code=1,
        traceback="".join(traceback.format_exception(error)),
        pickled_error=_pickled(error) if _is_own(error, function) else None,
        lost_peer=_lost_peer(error),
    )


def _is_own(error: BaseException, function: Callable[..., Any]) -> bool:
    """Return whether the exception is one that the function's package or this one defines, or an end by intent."""
    packages = {name.partition(".")[0] for name in (function.__module__, __name__)}
    return type(error).__module__.partition(".")[0] in packages or type(error) in (KeyboardInterrupt, SystemExit)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, whatever its __init__ takes; None if its attributes do not."""
    try:
        pickled = pickle.dumps((type(error), error.args, error.__dict__))
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _rebuilt(kind: type[BaseException], arguments: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


def _lost_peer(error: BaseException | None) -> bool:
    """Return whether the exception tells of a connection that broke, as gloo, NCCL and the store put it."""
    signs = r"closed by peer|reset by peer|broken pipe|timed out|pair closure|remote process exited|ncclRemoteError"
    while error is not None:
        if isinstance(error, (RuntimeError, OSError)) and re.search(signs, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


# Both


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the body."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting in the body and, until they unblock them, in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
