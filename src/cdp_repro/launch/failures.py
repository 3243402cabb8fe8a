"""How a rank fails, how its failure reaches the launching process, and the errors of both."""

from __future__ import annotations

import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class LaunchError(ValueError):
    """The user's mistake in how the processes were started."""


class RankFailedError(RuntimeError):
    """A rank has failed, and all others have been ended.

    Attributes:
        rank: The one that failed first.
        exit_code: The code with which it ended; None if a signal killed it.
        signal_name: The signal that killed it, if one did.
        traceback: The traceback of what it raised, if it raised anything.
    """

    def __init__(self, rank: int, exit_code: int | None, signal_name: str | None, traceback: str) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.traceback = traceback
        if traceback:
            super().__init__(f"rank {rank} failed:\n{traceback.rstrip()}")
        elif signal_name:
            memory = " (the kernel sends it, too, when memory runs out)" if signal_name == "SIGKILL" else ""
            super().__init__(f"rank {rank} was killed by {signal_name}{memory}")
        else:
            super().__init__(f"rank {rank} ended with exit code {exit_code} before it returned")


class StalledError(RuntimeError):
    """Waiting for some ranks was in vain; the message names them and says where each rank stands.

    Attributes:
        ranks: Those that neither went on nor gave up.
        signal: The number of the signal after which they should have ended, if one was sent.
    """

    def __init__(self, ranks: Sequence[int], cause: str, positions: str, signal: int | None = None) -> None:
        self.ranks = tuple(ranks)
        self.signal = signal
        super().__init__(f"{cause}\n{positions}" if positions else cause)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: its exception or, if it ended without one, its exit code."""

    rank: int
    seconds: float  # on the monotonic clock, which processes share
    exit_code: int | None = None
    traceback: str = ""
    pickled_error: bytes | None = None  # only of the caller's own exceptions
    lost_peer: bool = False  # probably a consequence of another rank's failure

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the rank, if one did."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def error(self) -> BaseException | None:
        """The exception itself, if it is one of the caller's own."""
        if self.pickled_error is None:
            return None
        kind, arguments, state = pickle.loads(self.pickled_error)
        error: BaseException = kind.__new__(kind, *arguments)
        error.__dict__.update(state)
        return error

    def as_error(self) -> RankFailedError:
        """Return the failure as the error that the launching process raises."""
        if self.signal is None:
            return RankFailedError(self.rank, self.exit_code, None, self.traceback)
        try:
            name = signal.Signals(self.signal).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {self.signal}"
        return RankFailedError(self.rank, None, name, self.traceback)


def failure_of(rank: int, error: BaseException, function: Callable[..., Any]) -> Failure:
    """Return the failure of a rank whose function raised `error`."""
    return Failure(
        rank,
        time.monotonic(),
        exit_code=1,
        traceback="".join(traceback.format_exception(error)),
        pickled_error=_pickled(error) if _is_own(error, function) else None,
        lost_peer=is_lost_peer(error),
    )


def _is_own(error: BaseException, function: Callable[..., Any]) -> bool:
    """Return whether the function's package or this one defines the exception, or it is a deliberate exit."""
    packages = {name.partition(".")[0] for name in (function.__module__, __name__)}
    return type(error).__module__.partition(".")[0] in packages or type(error) in (KeyboardInterrupt, SystemExit)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, whatever its __init__ takes; return None if its attributes cannot be pickled."""
    try:
        pickled = pickle.dumps((type(error), error.args, error.__dict__))
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


_BROKEN = (
    r"closed by peer|reset by peer|broken pipe|pair closure|no route to host|is unreachable|remote process exited|"
    r"ncclRemoteError"
)
_TIMEOUT = r"timed out|wait timeout|application timeout"
"""The last is gloo's, for any other use of a connection on which this process has timed out."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the exception reports a timeout or a broken connection, as gloo, NCCL and the store put it."""
    return is_timeout(error) or _tells(error, _BROKEN)


def is_timeout(error: BaseException) -> bool:
    """Return whether the exception reports that waiting for another rank timed out."""
    return isinstance(error, TimeoutError) or _tells(error, _TIMEOUT)


def _tells(error: BaseException | None, signs: str) -> bool:
    while error is not None:
        if isinstance(error, (RuntimeError, OSError)) and re.search(signs, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_to_raise(first: Failure, failures: Sequence[Failure]) -> BaseException:
    """Return the exception of the first failure, as raised by the lowest rank that raised one of its type."""
    error = first.error
    if error is None:
        return first.as_error()
    errors = [failure.error for failure in sorted(failures, key=lambda failure: failure.rank)]
    return next(other for other in errors if type(other) is type(error))
