"""The ledger: proof, while it runs, that every read was the one that the update rule asks for."""

from __future__ import annotations

from cdp_repro.schedule.actions import Op
from cdp_repro.schedule.rules import Mode


class LedgerError(RuntimeError):
    """The engine read a parameter version that the rule does not allow: a defect of the engine, never of the user."""


class Ledger:
    """Compares each read with d(i, j) as given, independently of the passes that wrote the program."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self.reads = 0

    def record(self, op: Op, step: int, worker: int, stage: int, version: int) -> None:
        """Record that `op` of (step, worker, stage) used `version`, as tagged by the update that made it."""
        delay = self._mode.staleness[worker][stage]
        expected = max(0, step - delay)
        if version != expected:
            raise LedgerError(
                f"{op.name.lower()} of stage {stage} by worker {worker} in step {step} used version {version}; "
                f"its staleness {delay} asks for version {expected}"
            )
        self.reads += 1
