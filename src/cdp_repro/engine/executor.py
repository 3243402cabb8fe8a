"""The second interpreter: runs a rank's program on tensors, action by action. There is no other loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from cdp_repro.engine.batches import Feed
from cdp_repro.engine.compute import SavedForward, StageCompute, backward
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.parameters import StageState
from cdp_repro.engine.randomness import seeded
from cdp_repro.engine.tracing import Tracer
from cdp_repro.schedule import Action, Op, Schedule, Slot


@dataclass(frozen=True)
class StepResult:
    """A training step whose updates are all done."""

    step: int
    loss_tensor: Tensor
    """[N], on the device: the mean loss of each worker's micro-batch."""

    @property
    def losses(self) -> list[float]:
        """The mean loss of each worker's micro-batch. Waits for the device."""
        losses: list[float] = self.loss_tensor.tolist()
        return losses


@dataclass(frozen=True)
class Settings:
    """What the executor needs to know beside the program and the state."""

    device: torch.device
    seed: int
    learning_rate_factor: Callable[[int], float]
    """Factor on the optimizer's learning rate in the update that produces theta[step + 1]."""


class Executor:
    """Executes one program, from a drained state to a drained state.

    Between two actions it holds only what is in flight: for each micro-batch the saved forwards, and the output
    or the gradient that the next stage will read.
    """

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[StageState],
        compute: Sequence[StageCompute],
        feed: Feed,
        settings: Settings,
        ledger: Ledger,
        tracer: Tracer,
    ) -> None:
        self._schedule = schedule
        self._states = states
        self._compute = compute
        self._feed = feed
        self._settings = settings
        self._ledger = ledger
        self._tracer = tracer
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor | None] = {}
        self._losses: dict[int, list[Tensor]] = {}
        self._finished: list[StepResult] = []
        self._handlers = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.UPDATE: self._update,
            Op.FREE: self._free,
        }

    def execute(self, slot: Slot) -> list[StepResult]:
        """Run the actions of one slot; return the training steps that they complete."""
        self._tracer.enter(slot)
        for action in slot.actions:
            begin = self._tracer.now()
            try:
                with record_function(str(action)):
                    executed = self._handlers[action.op](action)
            except Exception as error:
                error.add_note(f"while running {action} in slot {slot.number}")
                raise
            if self._tracer.active:
                self._tracer.record(slot.number, executed, [len(state.versions) for state in self._states], begin)
        finished, self._finished = self._finished, []
        return finished

    def _forward(self, action: Action) -> Action:
        micro_batch, stage = _compute_of(action)
        step, worker = divmod(micro_batch, self._schedule.workers)
        state, batch = self._states[stage], self._feed[step]
        inputs = batch.inputs(worker) if stage == 0 else self._outputs.pop(micro_batch)
        is_last = stage == self._schedule.stages - 1
        targets = batch.targets(worker) if is_last else None
        with seeded(self._settings.device, self._settings.seed, step, worker, stage):
            output, saved = self._compute[stage].forward(
                state.read(_version_of(action)), state.buffers[worker], inputs, targets, self._tracer.meter
            )
        self._saved[micro_batch, stage] = saved
        if is_last:
            self._losses.setdefault(step, []).append(output)
            # the mean over workers: each contributes with weight 1/N, so that gradients only need to be added
            self._gradients[micro_batch] = torch.full_like(output, 1 / self._schedule.workers)
        else:
            self._outputs[micro_batch] = output.requires_grad_(saved.edge is not None)
        return self._in_ledger(action, saved)

    def _backward(self, action: Action) -> Action:
        micro_batch, stage = _compute_of(action)
        saved = self._saved.pop((micro_batch, stage))
        grad_input, gradients = backward(saved, self._gradients.pop(micro_batch))
        if stage > 0:
            self._gradients[micro_batch] = grad_input
        self._states[stage].add_gradients(gradients)
        return self._in_ledger(action, saved)

    def _update(self, action: Action) -> Action:
        step = _version_of(action) - 1
        state = self._states[action.stage]
        state.update(self._settings.learning_rate_factor(step))
        if all(other.current > step for other in self._states):
            self._feed.release(step)
            self._finished.append(StepResult(step, torch.stack(self._losses.pop(step))))
        return action.at_version(state.current)

    def _free(self, action: Action) -> Action:
        self._states[action.stage].free(_version_of(action))
        return action

    def _in_ledger(self, action: Action, saved: SavedForward) -> Action:
        """Enter the version that was really used in the ledger; return the action as it was executed."""
        micro_batch, stage = _compute_of(action)
        step, worker = divmod(micro_batch, self._schedule.workers)
        self._ledger.record(action.op, step, worker, stage, saved.version.number)
        return action.at_version(saved.version.number)


def _compute_of(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None
    return action.micro_batch, action.stage


def _version_of(action: Action) -> int:
    assert action.version is not None
    return action.version
