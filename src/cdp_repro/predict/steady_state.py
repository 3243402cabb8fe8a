"""The cost of a setting of the cost table by simulation, once its pipeline is full."""

from __future__ import annotations

from collections import Counter

from cdp_repro.predict.closed_forms import Setting, Values
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import held_bytes, simulate_totals
from cdp_repro.schedule import Program

_PEAKS = {
    "activation_bytes_per_device": "activation_bytes_per_device",
    "activation_bytes_total": "activation_bytes",
    "parameter_bytes_per_device": "parameter_bytes_per_device",
    "versions_kept": "versions_kept",
    "messages_per_slot": "messages",
    "chain": "chain",
}
"""Quantities that are the maximum over slots of a field of `SlotTotals`."""


def simulated(setting: Setting, workers: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return the quantities of the full pipeline by simulation; the fill counts, the drain does not.

    Peaks are over all slots; bytes sent and the idle share are those of the last training step.
    """
    schedule = setting.schedule(workers, costs.gradient_bytes)
    program, length = Program(schedule), schedule.slots_per_step
    begin = program.steady_step * length
    peaks = dict.fromkeys(_PEAKS, 0.0)
    sent, computing = Counter[int](), 0
    for slot in simulate_totals(schedule, costs, program.until_it_repeats()):
        for quantity, name in _PEAKS.items():
            peaks[quantity] = max(peaks[quantity], getattr(slot, name))
        if slot.slot >= begin:
            sent.update(slot.bytes_sent)
            computing += slot.computing_ranks
    return peaks | {
        "devices": schedule.ranks,
        "optimizer_bytes_per_device": optimizer_states * max(held_bytes(schedule, costs)),
        "sent_bytes_per_device": sent.total() / schedule.ranks,
        "most_sent_bytes": max(sent.values(), default=0),
        "idle_share": 1 - computing / (schedule.ranks * length),
    }


def unit_costs(workers: int) -> StageCosts:
    """Return equal stages: A and P are N KiB, so that the table reads in A/N and P/N."""
    return StageCosts.equal(workers, activation_bytes=1024, parameter_bytes=1024)
