"""Turns signals into requests to stop at the next safe moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `signal`; after that, SIGINT acts as usual.

    Further SIGTERMs repeat the same request: SLURM and others send one to every process of a job, and a process that
    passes it on makes a second one. A sender that insists on an end sends SIGKILL next. A terminal that is closed sends
    SIGHUP, unless it is ignored, as under nohup.

    Outside the main thread, where Python allows no handlers, signals act as usual from the start.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            self._previous = {n: b for n, b in before.items() if n != signal.SIGHUP or b != signal.SIG_IGN}
            for number in self._previous:  # only now: a signal may come between the two
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for previous in self._previous.items():
            signal.signal(*previous)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])  # type: ignore[arg-type]
