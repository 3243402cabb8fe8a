"""Where each rank of a group stands, for the process that has to say why ranks wait in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cdp_repro.launch.failures import StalledError, is_lost_peer, is_timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PREFIX = "cdp_repro/position"
_TIMED_OUT_SECONDS = 5.0
"""How long a rank that has timed out waits for others to report the same: all ranks that wait for one rank time out
within about a slot."""
_LOST_SECONDS = 0.5
"""The same for a rank whose connection broke: the kernel tells all ranks at once."""
_POLL_SECONDS = 0.05
_WAITED, _LEFT = "has waited in vain", "was left by the others"
"""Why a rank has given up, if not for an error of its own."""
_ITS_PLACE = "rank 0, or what started it, has ended, or its host or the network to it is down"
"""Why the store is gone, with several hosts. On one host it is in the ranks' server, and they end with that."""


class Positions:
    """Each rank writes down what it begins, or that it gives up; any process with the store can read where all stand.

    Args:
        store: The store at which the ranks have met, without the prefixes of libraries; None if there is only one rank.
        ranks: The number of ranks.
        rank: This rank; None in the launching process, which only reads.
    """

    def __init__(self, store: Store | None, ranks: int, rank: int | None) -> None:
        self.ranks = ranks
        self._store, self._rank = store, rank
        if store is not None and rank is not None:
            store.set(_gave_up(rank), "")  # it may hold what an earlier group of this process has written

    def enter(self, *what: object) -> None:
        """Write down what this rank begins; the words are made into text only if there are other ranks to read them."""
        if self._store is not None:
            self._store.set(f"{_PREFIX}/{self._rank}", " ".join(map(str, what)))

    def note(self, error: Exception, doing: object) -> None:
        """Add to an error what this rank was doing and, if there are other ranks, where all stand."""
        where = f" on rank {self._rank}; where the ranks stand:\n{self.report()}"
        error.add_note(f"while {doing}{where if self.ranks > 1 else ''}")

    @contextmanager
    def noting(self, doing: object) -> Iterator[None]:
        """Run the body; `note` an error that is not the user's mistake."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self.note(error, doing)
            raise

    def give_up(self, error: BaseException) -> None:
        """Write down why this rank does not go on, as others would wait for it in vain."""
        if self._store is not None:
            with suppress(RuntimeError):  # the error that ended the run must be the one that is raised
                self._store.set(_gave_up(self._rank), _why(error))

    def report(self) -> str:
        """Return one line per rank: what it began last, and whether it has given up."""
        if self._store is None:
            return ""
        try:
            return "\n".join(f"  rank {rank} {self._of(rank)}" for rank in range(self.ranks))
        except RuntimeError as error:
            return f"  where the ranks stand cannot be read: {str(error).splitlines()[0]}"

    def _of(self, rank: int) -> str:
        began, gave_up = self._text(f"{_PREFIX}/{rank}"), self._text(_gave_up(rank))
        return (f"began {began}" if began else "has begun nothing yet") + (f"; it {gave_up}" if gave_up else "")

    def _text(self, key: str) -> str:
        assert self._store is not None
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def stalled(self, error: BaseException) -> StalledError:
        """Return the error that names the ranks that neither go on nor give up, after this one has lost others.

        The first to notice is rarely the neighbour of the rank that stalls, so all get a moment to give up.
        """
        self.give_up(error)
        timed_out = is_timeout(error)
        try:
            silent = self._silent(_TIMED_OUT_SECONDS if timed_out else _LOST_SECONDS)
            slow = [] if silent else self._slow()
        except RuntimeError as broken:
            why = str(broken).splitlines()[0]
            return StalledError([0], f"the store at which the ranks have met is gone ({why}): {_ITS_PLACE}", "")
        return StalledError(silent, _cause(silent, slow, timed_out), self.report())

    def _silent(self, seconds: float) -> list[int]:
        """Return the ranks that have not given up after `seconds`; return at once when there are none."""
        deadline = time.monotonic() + seconds
        while silent := [rank for rank in range(self.ranks) if not self._text(_gave_up(rank))]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return silent

    def _slow(self) -> list[int]:
        """Return the ranks one of which went on after others had waited for it in vain; none if they cannot be told.

        It finds its connections closed. So does a rank that has waited for less long than the one that closed them.
        """
        why = [self._text(_gave_up(rank)).partition(":")[0] for rank in range(self.ranks)]
        return [rank for rank, word in enumerate(why) if word == _LEFT] if set(why) == {_WAITED, _LEFT} else []


def _gave_up(rank: int | None) -> str:
    return f"{_PREFIX}/{rank}/gave-up"


def _why(error: BaseException) -> str:
    if is_timeout(error):
        return _WAITED
    told = f"{type(error).__name__}: {error}"
    return f"{_LEFT}: {told}" if is_lost_peer(error) else f"ended with {told}"


def _cause(silent: list[int], slow: list[int], timed_out: bool) -> str:
    if slow:
        one = f"{'one of ' if len(slow) > 1 else ''}{_those(slow)}"
        return f"{one} kept others waiting for more than timeout_seconds: raise it if what was begun may take so long"
    if not silent:
        return "the ranks wait for each other in vain"
    if timed_out:
        stall = "stall" if len(silent) > 1 else "stalls"
        return f"{_those(silent)} {stall}: the others have waited for timeout_seconds in vain"
    return f"the connection to {_those(silent)} is lost: look what ended there first"


def _those(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
