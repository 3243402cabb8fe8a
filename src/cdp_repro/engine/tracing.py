"""Tracing: records and meters the first training steps, then stops, because the pattern is periodic."""

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

    def __init__(self, schedule: Schedule, team: Team, steps: int) -> None:
        self._schedule = schedule
        self._team = team
        self.steps = steps
        self.begin(0)

    def begin(self, first_step: int) -> None:
        """Forget what has been recorded, and record as many training steps from `first_step` on."""
        self.end_step = first_step + self.steps
        self.active = self.steps > 0
        self.begins: list[int] = []
        """The first slot of each run that is traced."""
        self._recorder = TraceRecorder(self._team.rank, self._schedule.ranks, self._schedule.sizes)
        self._meter = ActivationMeter()
        self._origin = self._team.share(time.perf_counter()) - self._team.clock_offset() if self.active else 0.0

    @property
    def meter(self) -> ActivationMeter | None:
        """The meter while tracing is active, else None."""
        return self._meter if self.active else None

    def stop(self) -> None:
        """Record nothing from here on."""
        self.active = False

    def begin_run(self, first_slot: int, first_step: int) -> None:
        """Begin a run; recording stops at the slot in which the first step after the traced ones begins."""
        self._traced_here = self.end_step - first_step
        self._end_slot = first_slot + self._traced_here * self._schedule.slots_per_step
        if self.active:
            self.begins.append(first_slot)

    def enter(self, slot: Slot, begun: int) -> None:
        """Begin a slot of a run in which `begun` steps have begun.

        If no step follows the traced ones, the drain is recorded too.
        """
        self._slot = slot.number
        if slot.number >= self._end_slot and begun > self._traced_here:
            self.stop()

    def now(self) -> float:
        """Return seconds since the trace began, on the clock of rank 0. While tracing, this waits for compute.

        It does not wait for messages, which have their own streams: a receive ends only when the peer reaches its send.
        """
        if self.active and self._team.device.type == "cuda":
            torch.cuda.current_stream(self._team.device).synchronize()
        return time.perf_counter() - self._origin

    def record(self, action: Action, versions: Sequence[int], begin: float) -> None:
        """Record that `action` ran from `begin` until now, with the number of live versions of each stage after it."""
        self._recorder.record(self._slot, action, self._meter.live_bytes, versions, (begin, self.now()))

    def sent(self, action: Action, size: int) -> None:
        """Record that a SEND of this slot, or this rank's part in a COLLECTIVE, has sent `size` bytes, if any."""
        if self.active and size:
            self._recorder.sent(self._slot, action, size)

    def recorded(self) -> tuple[tuple[SlotRecord, ...], tuple[Message, ...]]:
        """Return the records and messages of this rank so far."""
        return self._recorder.finish()
