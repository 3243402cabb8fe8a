"""The cost table: what each setting costs, by closed form, by simulation and by execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdp_repro.observe.text import format_quantity
from cdp_repro.predict.closed_forms import QUANTITIES, Setting, Values, closed_form
from cdp_repro.predict.steady_state import simulated, unit_costs
from cdp_repro.report.groups import Group
from cdp_repro.report.tables import Table
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS, SETTINGS

SIMULATED = "simulated.json"
"""File of simulations that take too long to repeat with every report; each part has the versions that made it."""
OF_STEPS = (
    "Parameters are of training steps under way. Between two runs, as at an evaluation or a checkpoint, a rank holds "
    "every version that the next steps read, which may be more: with replicated whole copies of two versions in "
    "cdp_v1, with ampnet on N ranks N versions of its stage."
)
"""A note for tables with a column of parameters."""
_SHORT = {
    "devices": "devices",
    "activation_bytes_per_device": "activations, device with most",
    "activation_bytes_total": "activations in all",
    "parameter_bytes_per_device": "parameters, device with most",
    "optimizer_bytes_per_device": "optimizer, device with most",
    "versions_kept": "versions kept, at most",
    "sent_bytes_per_device": "sent a step, mean device",
    "most_sent_bytes": "sent a step, device with most",
    "messages_per_slot": "messages a slot, at most",
    "chain": "longest chain",
    "idle_share": "idle slots, mean over devices",
}


def executed(group: Group) -> Values:
    """Return the measurements of a run; a baseline is not traced, so only its bytes at rest are known."""
    found = {
        "devices": "ranks",
        "parameter_bytes_per_device": "memory/parameter_bytes_per_device",
        "optimizer_bytes_per_device": "memory/optimizer_bytes_per_device",
    }
    if group.config["baseline"] is None:
        found |= {
            "activation_bytes_per_device": "memory/activation_peak_bytes_per_device",
            "activation_bytes_total": "memory/activation_peak_bytes_total",
            "parameter_bytes_per_device": "memory/parameter_peak_bytes_per_device",
            "versions_kept": "memory/versions_kept",
            "sent_bytes_per_device": "comm/bytes_per_device_per_step",
            "messages_per_slot": "comm/max_messages_per_slot",
            "chain": "comm/max_chain_per_slot",
            "idle_share": "time/idle_share_of_slots",
        }
    summary = group.rows[0].summary
    if (newer := "comm/most_bytes_of_a_device_per_step") in summary:  # older rows lack it
        found["most_sent_bytes"] = newer
    return {quantity: float(summary[key]) for quantity, key in found.items()}


@dataclass(frozen=True)
class Line:
    """One setting with N workers: its quantities by closed form, simulation and execution, as far as known."""

    setting: Setting
    workers: int
    closed: Values
    simulated: Values
    executed: Values

    def disagreements(self) -> list[str]:
        """Return the quantities on which two of the three differ."""
        return [quantity for quantity in QUANTITIES if len(self._known(quantity)) and not self._alike(quantity)]

    def text(self, quantity: str) -> str:
        """Return the number, with its sources (c, s, e) unless all three agree; every number where they differ."""
        known = self._known(quantity)
        if not known:
            return "–"
        if self._alike(quantity):
            marks = "" if len(known) == 3 else f" ({', '.join(known)})"
            return f"{format_quantity(quantity, next(iter(known.values())))}{marks}"
        return "; ".join(f"{source} {format_quantity(quantity, value)}" for source, value in known.items())

    def _known(self, quantity: str) -> Values:
        sources = {"c": self.closed, "s": self.simulated, "e": self.executed}
        return {mark: values[quantity] for mark, values in sources.items() if quantity in values}

    def _alike(self, quantity: str) -> bool:
        values = self._known(quantity).values()
        return max(values) - min(values) <= 1e-9 * max(1.0, max(values))


def lines(groups: Sequence[Group]) -> list[Line]:
    """Return every setting for every N that was executed, with the costs of the network that ran."""
    by_setting = {(_key(group), group.config["workers"]): group for group in groups}
    found = []
    for workers in EXECUTED_WORKERS:
        costs = next((g.rows[0].costs for (_, n), g in by_setting.items() if n == workers), None)
        if costs is None:
            continue
        for setting in SETTINGS:
            group = by_setting.get((_setting_key(setting), workers))
            found.append(
                Line(
                    setting,
                    workers,
                    closed_form(setting, workers, costs, optimizer_states=1),
                    {} if setting.baseline else simulated(setting, workers, costs, optimizer_states=1),
                    executed(group) if group else {},
                )
            )
    return found


def simulations_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Values]]:
    """Return {N: {setting and mode: values}} of all parts of the file of simulations."""
    found: dict[str, dict[str, Values]] = {}
    for part in parts:
        for n, values in part["values"].items():
            found.setdefault(n, {}).update(values)
    return {n: found[n] for n in sorted(found, key=int)}


def large_lines(simulations: Mapping[str, Mapping[str, Values]]) -> list[Line]:
    """Return the settings for every N of `simulations` ({N: {setting and mode: values}}), with equal stages."""
    return [
        Line(setting, int(n), closed_form(setting, int(n), unit_costs(int(n)), 1), values[key], {})
        for n, values in simulations.items()
        for setting in SETTINGS
        if (key := simulation_key(setting)) in values
    ]


def simulation_key(setting: Setting) -> str:
    """Return the name of a setting in the file of simulations."""
    return f"{setting.name}, {setting.mode}"


def _key(group: Group) -> tuple[object, ...]:
    settings = ("placement.name", "baseline", "pipeline_schedule", "collectives")
    return group.mode, *(group.config[name] for name in settings)


def _setting_key(setting: Setting) -> tuple[object, ...]:
    return setting.mode, setting.placement, setting.baseline, setting.pipeline_schedule, setting.collectives


def cost_table(found: Sequence[Line], workers: int, notes: Sequence[str], evidence: Sequence[str]) -> Table:
    """Return the table of N = `workers`."""
    rows = [
        [line.setting.name, line.setting.mode, *(line.text(quantity) for quantity in QUANTITIES)]
        for line in found
        if line.workers == workers
    ]
    title = f"What each setting costs with N = S = {workers}"
    return Table(f"costs_N{workers}", title, ("setting", "mode", *_SHORT.values()), rows, notes, evidence)


def agreement_table(found: Sequence[Line]) -> Table:
    """Return every number of every N by closed form, simulation and execution, and whether those known agree."""
    rows = []
    for line in found:
        for quantity in QUANTITIES:
            values = [values.get(quantity) for values in (line.closed, line.simulated, line.executed)]
            if any(value is not None for value in values):
                known = sum(value is not None for value in values)
                agree = "no" if quantity in line.disagreements() else "yes" if known > 1 else ""
                texts = ["" if value is None else f"{value:.10g}" for value in values]
                rows.append(
                    [
                        str(line.workers),
                        line.setting.name,
                        line.setting.mode,
                        quantity,
                        *texts,
                        agree,
                    ]
                )
    columns = ("N", "setting", "mode", "quantity", "closed form", "simulated", "executed", "agree")
    return Table("costs_all", "Closed form, simulation and execution", columns, rows, for_readers=False)


def large_table(found: Sequence[Line], made_by: Sequence[str]) -> Table:
    """Return the settings for large N, a row per setting, and where formulas and simulation disagree.

    `made_by` says which versions made the simulations.
    """
    shown = (
        "activation_bytes_per_device",
        "activation_bytes_total",
        "sent_bytes_per_device",
        "messages_per_slot",
        "chain",
        "idle_share",
    )
    rows = [
        [str(line.workers), line.setting.name, line.setting.mode, f"{line.closed['devices']:g}",
         *(line.text(quantity).removesuffix(" (c, s)") for quantity in shown),
         ", ".join(line.disagreements()) or "none"]
        for line in found
    ]  # fmt: skip
    columns = ("N", "setting", "mode", "devices", *(_SHORT[quantity] for quantity in shown), "disagreements")
    notes = [
        "Equal stages of 1 KiB of activations and 1 KiB of parameters each, so that A = P = N KiB. A number "
        "stands for closed form and simulation alike; (s): simulation only."
    ]
    evidence = ["Simulated by `python scripts/simulate.py`, and kept in results/simulated.json.", *made_by]
    return Table("costs_large", "What each setting costs with many workers", columns, rows, notes, evidence)
