"""The ledger: proof, while it runs, that every read was the one that the update rule asks for."""

from __future__ import annotations

from functools import cache

from cdp_repro.schedule import Action, Op, Schedule


class LedgerError(RuntimeError):
    """The engine read a parameter version that the rule does not allow: a defect of the engine, never of the user."""


class Ledger:
    """Compares each read with the rule's staleness, independently of the passes that wrote the program."""

    def __init__(self, schedule: Schedule) -> None:
        self._sizes, self._rule = schedule.sizes, schedule.rule
        self._delay = cache(self._staleness)
        self.reads = 0

    def record(self, action: Action, version: int) -> None:
        """Record that a forward or backward used `version`, as tagged by the update that made it.

        Raises:
            LedgerError: the rule asks for another.
        """
        sizes = self._sizes
        step, i = divmod(action.micro_batch, sizes.micro_batches)
        delay = self._delay(action.op is Op.FORWARD, i // sizes.replicas, action.stage)
        asked = max(0, step * sizes.updates + i // sizes.summed - delay)
        if version != asked:
            raise LedgerError(
                f"{action.op.name.lower()} of stage {action.stage} on micro-batch {i} of step {step} used version "
                f"{version}; its staleness {delay} asks for version {asked}"
            )
        self.reads += 1

    def _staleness(self, is_forward: bool, i: int, j: int) -> int:
        return self._rule.staleness(i, j) if is_forward else self._rule.backward_staleness(i, j)
