"""The ledger: proof, while it runs, that every read was the one that the update rule asks for."""

from __future__ import annotations

from cdp_repro.schedule import Action, Schedule


class LedgerError(RuntimeError):
    """The engine read a parameter version that the rule does not allow: a defect of the engine, never of the user."""


class Ledger:
    """Compares each read, as tagged by the update that made it, with the version that the rule asks for."""

    def __init__(self, schedule: Schedule) -> None:
        self._sizes, self._rule, self.reads = schedule.sizes, schedule.rule, 0

    def record(self, action: Action, version: int) -> None:
        """Record that a forward or backward used `version`.

        Raises:
            LedgerError: the rule asks for another.
        """
        asked = self._rule.version(action.micro_batch, action.stage, action.op)
        if version != asked:
            step, i = divmod(action.micro_batch, self._sizes.micro_batches)
            raise LedgerError(
                f"{action.op.name.lower()} of stage {action.stage} on micro-batch {i} of step {step} used version "
                f"{version}; the rule asks for version {asked}"
            )
        self.reads += 1
