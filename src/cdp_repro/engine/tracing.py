"""Tracing: meters and records the first training steps of a run, then steps aside (the pattern is periodic)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.schedule import Action, Schedule, Slot, Trace, TraceRecorder


class Tracer:
    """Records every action of the first `steps` training steps, with live bytes and versions."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device, steps: int) -> None:
        self._schedule = schedule
        self._device = device
        self._end_step = steps
        self._recorder = TraceRecorder(rank, schedule.stages)
        self._meter = ActivationMeter()
        self._origin = time.perf_counter()
        self.active = steps > 0

    @property
    def meter(self) -> ActivationMeter | None:
        """The meter while tracing is active, else None."""
        return self._meter if self.active else None

    def stop(self) -> None:
        """Record nothing from here on."""
        self.active = False

    def enter(self, slot: Slot) -> None:
        """Stop at the first slot that computes a step beyond the traced ones."""
        for action in slot.actions:
            if action.micro_batch is not None and action.micro_batch // self._schedule.workers >= self._end_step:
                self.stop()

    def now(self) -> float:
        """Return seconds since the trace began; while tracing is active the device is waited for."""
        if self.active and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._origin

    def record(self, slot: int, action: Action, versions: Sequence[int], begin: float) -> None:
        """Record that `action` has run since `begin`, with the live versions of each stage after it."""
        self._recorder.record(slot, action, self._meter.live_bytes, versions, (begin, self.now()))

    def trace(self) -> Trace:
        """Return what has been recorded so far."""
        return Trace(self._schedule.workers, self._schedule.stages, self._recorder.finish())
