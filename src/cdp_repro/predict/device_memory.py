"""What a device needs memory for, on the device with most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cdp_repro.config import RunConfig
from cdp_repro.predict.simulate import SlotTotals
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.predict.training_state import predicted_parameter_bytes, training_state
from cdp_repro.schedule import Program


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a whole run, each on the device that has most of it.

    Not counted: mini-batches, buffers of layers and of messages on their way, the gradients of a layer until they are
    added to their sum, and what torch and its kernels take for themselves.
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
    """Of all these at one time, and of parameters that are lent: at most their sum, as their peaks are at other times,
    or on other devices."""


def device_memory(config: RunConfig, cut: StageCut, program: Program, totals: Iterable[SlotTotals]) -> DeviceMemory:
    """Return the memory for a program of `config`; `totals` are of its slots, with the run's optimizer states."""
    optimizer, delay = training_state(config, cut, program.schedule).most_on_a_rank(program.schedule)
    copies, totals = predicted_parameter_bytes(config, cut, program), [*totals]
    return DeviceMemory(
        max(total.activation_bytes_per_device for total in totals),
        max(total.parameter_bytes_per_device for total in totals),
        max(total.gradient_bytes_per_device for total in totals),
        optimizer,
        delay,
        copies,
        max(total.bytes_per_device for total in totals) + copies,
    )
