"""Starts ranks by forking a process that has imported what all of them need.

Importing torch and its dependencies takes seconds of CPU time: with more ranks than cores, that would be most of a
short run. So one process does the imports, in the environment of the ranks, and forks them. Until then it starts no
threads and computes nothing, so it leaves them nothing that a fork breaks. Then it has the store at which they meet, so
that the process that starts it needs no torch. The `forkserver` of `multiprocessing` forks as well, but a Python
process has only one: later ranks would inherit the environment, the standard streams and the blocked signals of the
first.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from cdp_repro.launch.environment import environment
from cdp_repro.launch.in_rank import end_with_starter
from cdp_repro.launch.signals import STOP_SIGNALS
from cdp_repro.schedule.garbage import without_collection

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KILL_SECONDS = 5.0
"""How long to wait for killed ranks: a driver that does not let go of one would make the wait endless."""
_CLIENT_SECONDS = 5.0
"""How long a client waits at most for the store of its own machine, which answers at once if it is there."""
_OF_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets a module ask during its import whether there is a GPU: once CUDA itself has been asked, it works in no fork."""


class ForkedRanks:
    """Ranks, seen from the process that starts them.

    Attributes:
        numbers: The numbers of all ranks.
        exit_codes: By rank that has ended: its exit code, or -k if signal k killed it.

    Args:
        target: The function that each rank calls with its number and `arguments`.
        arguments: Must be picklable.
        variables: Environment variables for all ranks.
        own_variables: Environment variables by rank.
        imports: The modules to import before the ranks are forked, besides that of `target`.
        listener: Listens at the port of the store; closed here.
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: Sequence[Any],
        variables: Mapping[str, str],
        own_variables: Sequence[Mapping[str, str]],
        imports: Sequence[str],
        listener: socket.socket,
    ) -> None:
        self.exit_codes: dict[int, int] = {}
        self.numbers = range(len(own_variables))
        self._pids: list[int] = []
        self._news, theirs = get_context("spawn").Pipe(duplex=False)
        with environment({"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}):  # on locks that killed ranks leave
            resource_tracker.ensure_running()  # else `start` would do it, and unblock the signals
        self._server: BaseProcess = get_context("spawn").Process(
            target=_serve, args=(target, arguments, own_variables, imports, listener, theirs)
        )
        with environment({**variables, **_OF_FORKS}), _blocked_signals(), listener:
            self._server.start()
        theirs.close()

    @property
    def running(self) -> list[int]:
        """The numbers of the ranks that have not ended, as far as is known."""
        return [number for number in self.numbers if number not in self.exit_codes]

    @property
    def have_started(self) -> bool:
        """Whether the ranks have been forked, as far as is known: then there is also their store."""
        return bool(self._pids)

    def wait(self, seconds: float) -> None:
        """Wait until ranks start or end, but at most this long."""
        if self.running:
            wait([self._news], timeout=seconds)
        while self.running and self._news.poll():
            try:
                self._take(self._news.recv())
            except EOFError:  # the server has ended, and the kernel has ended its ranks
                self._server.join()
                code = self._server.exitcode
                assert code is not None
                self._take(dict.fromkeys(self.running, code))

    def _take(self, news: list[int] | dict[int, int]) -> None:
        if isinstance(news, list):
            self._pids = news
        else:
            self.exit_codes |= news

    def send(self, number: int) -> bool:
        """Send a signal to the running ranks; return whether they had started and so received it."""
        for rank in self.running if self._pids else ():
            with suppress(ProcessLookupError):  # it has ended, and the news of it are on their way
                os.kill(self._pids[rank], number)
        return self.have_started

    def end(self) -> None:
        """Kill the ranks that still run, stopped ones as well, and the server."""
        self.send(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while self._pids and self.running and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        self._server.kill()
        self._server.join()
        self._news.close()


def _serve(
    target: Callable[..., None],
    arguments: Sequence[Any],
    own_variables: Sequence[Mapping[str, str]],
    imports: Sequence[str],
    listener: socket.socket,
    news: Connection,
) -> None:
    """Import, fork the ranks, send their process ids, serve the store, and send the exit code of each: {rank: code}.

    Signals stay blocked: they are for the ranks, which unblock them when they are ready. Otherwise Ctrl-C would show a
    traceback from the middle of an import.
    """
    end_with_starter()
    with without_collection():  # most of what an import makes stays
        for name in imports:
            importlib.import_module(name)
    # On macOS, libraries that torch links to break in a fork.
    context = get_context("fork") if sys.platform == "linux" else get_context("spawn")
    ranks: dict[int, BaseProcess] = {}
    try:
        for number, own in enumerate(own_variables):
            ranks[number] = context.Process(target=_be_rank, args=(target, number, arguments, own))
            ranks[number].start()
        news.send([rank.pid for rank in ranks.values()])
        store = store_at(listener.getsockname()[1], listener.detach())  # after the forks: it starts threads
        while ranks:
            wait([rank.sentinel for rank in ranks.values()])
            ended = {number: rank.exitcode for number, rank in ranks.items() if rank.exitcode is not None}
            news.send(ended)
            ranks = {number: rank for number, rank in ranks.items() if number not in ended}
        del store  # until here: the ranks meet there
    finally:
        for rank in ranks.values():  # after an error: this process would wait for them, and they for the store
            rank.kill()


def store_at(port: int, listening: int | None = None) -> Store:
    """Return a client of the store at a port of this machine, or the store, given the descriptor that listens there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: what the ranks import is their affair

    store: Store
    if listening is None:
        store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=_CLIENT_SECONDS))
    else:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    return store


def _be_rank(target: Callable[..., None], number: int, arguments: Sequence[Any], own: Mapping[str, str]) -> None:
    os.environ.update(own)
    target(number, *arguments)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block `STOP_SIGNALS` in the body, and in the processes that it starts until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
