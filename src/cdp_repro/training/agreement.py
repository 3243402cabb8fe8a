"""All ranks stop before the same training step, whichever of them was asked to."""

from __future__ import annotations

from cdp_repro.engine.team import Team

_KEY = "stop_before_step"


class StopAgreement:
    """Rank 0 decides, and tells the others in time.

    A rank is never more than `lead` steps ahead of rank 0, since every update needs all ranks: when rank 0, about to
    begin step t, stops before step t + lead, then each rank learns it before it begins that step.
    """

    def __init__(self, team: Team, lead: int) -> None:
        self._team = team
        self._lead = lead if team.size > 1 else 0
        self._stop_before: int | None = None

    def ends_before(self, step: int, wanted: bool) -> bool:
        """Whether `step`, which is about to begin, is not to; on rank 0, `wanted` says that the run shall stop."""
        if self._stop_before is None:
            if self._team.rank == 0 and wanted:
                self._stop_before = step + self._lead
                if self._team.size > 1:
                    self._team.store.set(_KEY, str(self._stop_before))
            elif self._team.rank and self._team.store.check([_KEY]):
                self._stop_before = int(self._team.store.get(_KEY))
        return self._stop_before is not None and step >= self._stop_before
