"""All ranks stop before the same training step, whichever of them was asked to."""

from __future__ import annotations

from cdp_repro.launch.team import Team

_WANTED, _DECIDED = "stop_wanted", "stop_before_step"


class StopAgreement:
    """Any rank may ask; rank 0 decides, and tells the others in time.

    A rank is never more than `lead` steps ahead of rank 0, since every update needs all ranks. So if rank 0, about to
    begin step t, decides to stop before step t + lead, each rank learns it before it begins that step.
    """

    def __init__(self, team: Team, lead: int) -> None:
        self._team = team
        self._lead = lead
        self._stop_before: int | None = None

    def ends_before(self, step: int, wanted: bool) -> bool:
        """Whether to stop before `step`, which is about to begin; `wanted` says that this rank was asked to stop."""
        if self._stop_before is None:
            if self._team.size == 1:
                self._stop_before = step if wanted else None
            elif self._team.rank == 0:
                self._decide(step, wanted)
            else:
                self._follow(wanted)
        return self._stop_before is not None and step >= self._stop_before

    def _decide(self, step: int, wanted: bool) -> None:
        if wanted or self._team.store.check([_WANTED]):
            self._stop_before = step + self._lead
            self._team.store.set(_DECIDED, str(self._stop_before))

    def _follow(self, wanted: bool) -> None:
        if wanted:  # a signal may reach this host alone
            self._team.store.set(_WANTED, "")
        if self._team.store.check([_DECIDED]):
            self._stop_before = int(self._team.store.get(_DECIDED))
