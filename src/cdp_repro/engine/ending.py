"""Ranks that leave a run at different moments agree on the step after which the pipeline drains."""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import PrefixStore

from cdp_repro.launch.team import Team


class Ending:
    """How many training steps each rank has begun in one run, and which ranks would begin no more.

    Ranks are not at the same place when a step is finished: one may have begun five steps when another, which has
    yielded the same results, has begun four. If the latter ended there, the fifth step would lack its messages. So a
    rank that would end records that, and continues while another has begun more steps. All end after the same step.
    """

    def __init__(self, team: Team, run: int) -> None:
        """`run` is the number of the run of an engine, the same on all ranks."""
        self._team = team
        self._store = PrefixStore(f"run/{run}", team.store) if team.size > 1 else None

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps."""
        if self._store is not None:
            self._store.set(f"begun/{self._team.rank}", str(steps))

    def ends_after(self, steps: int) -> bool:
        """Return whether the run ends after `steps` steps, as this rank proposes; False if another has begun more.

        Waits until all ranks propose to end after `steps` steps, or one has begun more.

        Raises:
            TimeoutError: some rank has done neither within the time limit.
        """
        if self._store is None:
            return True
        ranks = range(self._team.size)
        self._store.set(f"ends/{self._team.rank}/{steps}", "")
        deadline = time.monotonic() + self._team.timeout_seconds
        while True:
            ended = [self._store.check([f"ends/{rank}/{steps}"]) for rank in ranks]
            if all(ended):
                return True
            if any(self._begun(rank) > steps for rank in ranks if not ended[rank]):
                return False
            if time.monotonic() > deadline:
                missing = [rank for rank in ranks if not ended[rank]]
                raise TimeoutError(
                    f"rank {self._team.rank} would end this run after {steps} steps, but ranks {missing} have neither "
                    f"ended it nor begun another step for {self._team.timeout_seconds:.0f} s: leave `run` on every rank"
                )
            time.sleep(0.001)

    def _begun(self, rank: int) -> int:
        assert self._store is not None
        key = f"begun/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0
