"""What a device needs memory for, on the device with most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.config import RunConfig
from cdp_repro.predict.simulate import SlotTotals, simulate_totals
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.predict.training_state import optimizer_states, predicted_parameter_bytes, training_state
from cdp_repro.schedule import Program


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a whole run, each on the device that has most of it.

    Not counted: mini-batches, buffers of layers and of messages on their way, the gradients of a layer until they are
    added to their sum, and what kernels and torch take for themselves.
    """

    activations: int
    parameters: int
    """Of all versions."""
    gradients: int
    """Of sums that wait for their update, or to be sent."""
    optimizer: int
    delay: int
    """Kept by the method against delay."""
    copies: int
    """Of parameters moved on, which stale reads see with `delay=prediction`."""
    together: int
    """Of all these at one time, of parameters that are lent, and of what an update computes with: clipped gradients. It
    is less than the sum of all where their peaks are at other times, or on other devices."""


def totals_of(config: RunConfig, cut: StageCut, program: Program) -> list[SlotTotals]:
    """Return the totals of a complete run of a program of `config`: fill, steps that repeat, and drain.

    If the drain leaves older versions, totals of a second run from there follow, which may need more.
    """
    schedule, steps = program.schedule, program.steady_step + 2
    slots = program.complete_run
    if schedule.rule.longest:
        slots += program.slots(steps, first_step=steps)
    states = optimizer_states(config, cut, schedule)
    return [*simulate_totals(schedule, cut.costs, slots, states, clips=config.optim.clip_norm is not None)]


def device_memory(config: RunConfig, cut: StageCut, program: Program, totals: Sequence[SlotTotals]) -> DeviceMemory:
    """Return the memory for a program of `config`, given its `totals_of`."""
    optimizer, delay = training_state(config, cut, program.schedule).most_on_a_rank(program.schedule)
    copies = predicted_parameter_bytes(config, cut, program)
    return DeviceMemory(
        max(total.activation_bytes_per_device for total in totals),
        max(total.parameter_bytes_per_device for total in totals),
        max(total.gradient_bytes_per_device for total in totals),
        optimizer,
        delay,
        copies,
        max(total.bytes_per_device for total in totals) + copies,
    )
