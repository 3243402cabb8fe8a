"""What each system of the field costs on the same sizes, executed on real ranks, beside its simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.observe.text import format_quantity
from cdp_repro.predict.systems import System, simulated_system
from cdp_repro.report.cost_table import OF_STEPS
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group
from cdp_repro.report.tables import Table
from cdp_repro.studies.catalog import SYSTEM_MICRO_BATCHES, SYSTEM_RANKS
from cdp_repro.studies.rows import Row
from cdp_repro.studies.study import Study

COLUMNS = {
    "idle_share": "idle slots, mean rank",
    "activation_bytes": "activations, rank with most",
    "parameter_bytes": "parameters of all versions, rank with most",
    "versions": "versions of a stage, at most",
    "messages": "messages",
    "bytes_sent": "sent, mean rank",
}
"""Measured attributes of `System`."""


@dataclass(frozen=True)
class ExecutedSystem:
    """One system: simulated, and as it ran."""

    simulated: System
    executed: Mapping[str, float]
    """By attribute of `System`."""

    def disagreements(self) -> list[str]:
        """Return the attributes on which simulation and execution differ."""
        return [name for name, value in self.executed.items() if abs(value - getattr(self.simulated, name)) > 1e-9]

    def text(self, name: str) -> str:
        """Return the executed number, and the simulated one if it differs."""
        executed = format_quantity(name, self.executed[name])
        if name not in self.disagreements():
            return executed
        return f"e {executed}; s {format_quantity(name, getattr(self.simulated, name))}"


def executed_systems(groups: Sequence[Group], study: Study) -> list[ExecutedSystem]:
    """Return those systems of the study that have run, in its order."""
    return [*_executed({group.rows[0].cell: group.rows[0] for group in groups}, study)]


def _executed(rows: Mapping[str, Row], study: Study) -> Iterator[ExecutedSystem]:
    for cell in study.cells:
        if cell.hash in rows:
            row = rows[cell.hash]
            schedule = cell.config.schedule(row.costs.gradient_bytes)
            updates, measured = SYSTEM_MICRO_BATCHES // schedule.sizes.sample_parts, row.summary
            yield ExecutedSystem(
                simulated_system(schedule, row.costs, SYSTEM_MICRO_BATCHES),
                {
                    "idle_share": measured["time/idle_share_of_slots"],
                    "activation_bytes": measured["memory/activation_peak_bytes_per_device"],
                    "parameter_bytes": measured["memory/parameter_peak_bytes_per_device"],
                    "versions": measured["memory/versions_kept"],
                    "messages": updates * measured["comm/messages_per_step"],
                    "bytes_sent": updates * measured["comm/bytes_per_device_per_step"],
                },
            )


def systems_table(groups: Sequence[Group], study: Study) -> Table:
    """Return the table of the systems that have run."""
    systems = executed_systems(groups, study)
    rows = [
        [each.simulated.mode, each.simulated.placement, str(each.simulated.ranks), *map(each.text, COLUMNS),
         f"{each.simulated.mean_staleness:.2f}", str(each.simulated.largest_staleness)]
        for each in systems
    ]  # fmt: skip
    differing = [f"{each.simulated.mode} {each.simulated.placement}" for each in systems if each.disagreements()]
    missing = len(study.cells) - len(systems)
    notes = [
        f"{SYSTEM_RANKS} ranks that compute, a mini-batch of {SYSTEM_MICRO_BATCHES} micro-batches, the same network; "
        "interleaved cuts it into two stages a rank. Messages and bytes are of a mini-batch in the steady state: "
        "systems that update after each micro-batch make eight updates of it. Staleness: updates that a forward "
        "misses, mean over micro-batches and stages, and the largest; every read of the runs was at that version. "
        + (
            f"Execution (e) and simulation (s) differ for {', '.join(differing)}."
            if differing
            else "Simulation gives every number that was executed."
        ),
        *([f"{missing} systems have not been run: python scripts/costs.py {study.name}"] if missing else []),
        OF_STEPS,
    ]
    columns = ("mode", "placement", "ranks", *COLUMNS.values(), "mean staleness", "largest")
    return Table("systems", study.title, columns, rows, notes, provenance([group.rows[0] for group in groups]))
