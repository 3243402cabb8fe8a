"""The ledger: proof, during the run, that every read had the version that the rule asks for."""

from __future__ import annotations

from cdp_repro.schedule import Action, Schedule


class LedgerError(RuntimeError):
    """The engine read a parameter version that the rule does not allow: a bug in the engine, never a user error."""


class Ledger:
    """Compares each version read, as numbered by the update that made it, with the version that the rule asks for."""

    def __init__(self, schedule: Schedule) -> None:
        self._sizes, self._rule, self.reads = schedule.sizes, schedule.rule, 0

    def record(self, action: Action, version: int) -> None:
        """Record that a forward or backward used `version`.

        Raises:
            LedgerError: the rule asks for another version.
        """
        asked = self._rule.version(action.micro_batch, action.stage, action.op)
        if version != asked:
            step, i = divmod(action.micro_batch, self._sizes.micro_batches)
            raise LedgerError(
                f"{action.op.name.lower()} of stage {action.stage} on micro-batch {i} of step {step} used version "
                f"{version}; the rule asks for version {asked}"
            )
        self.reads += 1
