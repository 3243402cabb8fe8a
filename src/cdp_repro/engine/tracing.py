"""Tracing: meters and records the first training steps of a run, then steps aside (the pattern is periodic)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Action, Schedule, Slot
from cdp_repro.trace import Message, SlotRecord, TraceRecorder


class Tracer:
    """Records every action of the first `steps` training steps, with live bytes and versions."""

    def __init__(self, schedule: Schedule, team: Team, device: torch.device, steps: int) -> None:
        self._schedule = schedule
        self._device = device
        self._end_step = steps
        self._recorder = TraceRecorder(team.rank, schedule.ranks, schedule.sizes)
        self._meter = ActivationMeter()
        self._origin = team.share(time.perf_counter()) - team.clock_offset() if steps > 0 else 0.0
        self.active = steps > 0

    @property
    def meter(self) -> ActivationMeter | None:
        """The meter while tracing is active, else None."""
        return self._meter if self.active else None

    def stop(self) -> None:
        """Record nothing from here on."""
        self.active = False

    def begin_run(self, first_slot: int, first_step: int) -> None:
        """Begin a run: nothing is recorded from the slot on in which the first step beyond the traced ones begins."""
        self._traced_here = self._end_step - first_step
        self._end_slot = first_slot + self._traced_here * self._schedule.slots_per_step

    def enter(self, slot: Slot, begun: int) -> None:
        """Begin a slot of a run in which `begun` steps have begun.

        The drain is recorded if no step comes after the traced ones.
        """
        self._slot = slot.number
        if slot.number >= self._end_slot and begun > self._traced_here:
            self.stop()

    def now(self) -> float:
        """Return seconds since the trace began, on the clock of rank 0; while tracing, compute is waited for.

        Not so messages, which have streams of their own: a receive ends only when the other rank comes to its send.
        """
        if self.active and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - self._origin

    def record(self, slot: int, action: Action, versions: Sequence[int], begin: float) -> None:
        """Record that `action` has run since `begin`, with the live versions of each stage after it."""
        self._recorder.record(slot, action, self._meter.live_bytes, versions, (begin, self.now()))

    def sent(self, action: Action, size: int) -> None:
        """Record that a SEND, or the part in a COLLECTIVE, of this slot has sent `size` bytes."""
        self._recorder.sent(self._slot, action, size)

    def recorded(self) -> tuple[tuple[SlotRecord, ...], tuple[Message, ...]]:
        """Return the records and messages of this rank so far."""
        return self._recorder.finish()
