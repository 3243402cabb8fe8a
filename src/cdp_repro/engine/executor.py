"""The second interpreter: runs a rank's program on tensors, action by action. There is no other loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.profiler import record_function

from cdp_repro.engine.batches import Feed
from cdp_repro.engine.compute import Gradients, SavedForward, StageCompute, Version, backward
from cdp_repro.engine.layouts import VALUE
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.loan import Loan
from cdp_repro.engine.losses import Losses
from cdp_repro.engine.mailbox import Mailbox
from cdp_repro.engine.parameters import StageState, WorkerBuffers
from cdp_repro.engine.positions import Positions
from cdp_repro.engine.randomness import seeded
from cdp_repro.engine.tracing import Tracer
from cdp_repro.schedule import Action, MessageKey, Op, Payload, Schedule, Slot, consumed, ring_bytes


@dataclass(frozen=True)
class StepResult:
    """A training step whose updates are all done."""

    step: int
    loss_tensor: Tensor
    """[N]: the mean loss of each worker's micro-batch (with replicas, of all of them). On ranks other than 0 only of
    the workers whose last stage they compute; nan of others."""

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
    """Executes the program of one rank, from a drained state to a drained state.

    Between two actions it holds only what is in flight: for each micro-batch the saved forwards, the output or the
    gradient that the next stage will read, and gradients on their way to the owner of a stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        states: Mapping[int, StageState],
        buffers: Sequence[WorkerBuffers],
        compute: Sequence[StageCompute],
        feed: Feed,
        losses: Losses,
        settings: Settings,
        ledger: Ledger,
        tracer: Tracer,
        positions: Positions,
        mailbox: Mailbox | None = None,
    ) -> None:
        """`states` are of the stages that this rank holds; `mailbox` is None on a single device."""
        self._schedule = schedule
        self._micro_batches = schedule.micro_batches
        self._rank = rank
        self._states = states
        self._buffers = buffers
        self._compute = compute
        self._feed = feed
        self._losses = losses
        self._settings = settings
        self._ledger = ledger
        self._tracer = tracer
        self._positions = positions
        self._mailbox = mailbox
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor | None] = {}
        self._for_owner: dict[tuple[int, int], Gradients] = {}
        self._finished: list[StepResult] = []
        self._last_uses: set[Action] = set()
        self._handlers = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.ADD: self._add,
            Op.UPDATE: self._update,
            Op.FREE: self._free,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.COLLECTIVE: self._collective,
        }

    def execute(self, slot: Slot) -> list[StepResult]:
        """Run the actions of one slot; return the training steps that they complete on this rank."""
        if slot.actions:
            self._positions.enter(slot)
        if self._mailbox is not None:
            with self._telling(f"waiting, in slot {slot.number}, for what it has sent a training step before"):
                self._mailbox.enter(slot.number)
        self._last_uses = _last_uses(slot)
        for action in slot.actions:
            begin, text = self._tracer.now(), str(action)
            with self._telling(f"running {text} in slot {slot.number}"), record_function(text):
                executed = self._handlers[action.op](action)
            if self._tracer.active:
                self._tracer.record(slot.number, executed, self._live_versions(), begin)
        finished, self._finished = self._finished, []
        return finished

    def drain(self) -> None:
        """Take in what waits for the next program (buffers), and wait until all has been sent."""
        if self._mailbox is None:
            return
        with self._telling("draining"):
            for _, stage, micro_batch, *_ in self._mailbox.announced():
                assert micro_batch is not None
                self._receive_buffers(stage, micro_batch)
            self._mailbox.flush()
            self._losses.flush()

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """Add to an error what this rank was doing, and, if there are others, where all stand."""
        try:
            yield
        except Exception as error:
            where = f" on rank {self._rank}; where the ranks stand:\n{self._positions.report()}"
            error.add_note(f"while {doing}{where if self._mailbox else ''}")
            raise

    def _forward(self, action: Action) -> Action:
        micro_batch, stage = _compute_of(action)
        step, worker = divmod(micro_batch, self._micro_batches)
        batch = self._feed[step]
        self._receive_buffers(stage, micro_batch - self._micro_batches)
        inputs = batch.inputs(worker) if stage == 0 else self._input(micro_batch, stage)
        is_last = stage == self._schedule.stages - 1
        targets = batch.targets(worker) if is_last else None
        version, loan = self._read(action)
        with seeded(self._settings.device, self._settings.seed, step, worker, stage):
            output, saved = self._compute[stage].forward(
                version, self._buffers[stage].of[worker], inputs, targets, self._tracer.meter, loan
            )
        if loan is not None:
            loan.give_back()
        self._saved[micro_batch, stage] = saved
        if is_last:
            self._losses.enter(step, worker, output)
            # the mean over workers: each contributes with weight 1/N, so that gradients only need to be added
            self._gradients[micro_batch] = torch.full_like(output, 1 / self._micro_batches)
        else:
            self._outputs[micro_batch] = output.requires_grad_(saved.edge is not None)
        return self._in_ledger(action, saved)

    def _backward(self, action: Action) -> Action:
        micro_batch, stage = _compute_of(action)
        saved = self._saved.pop((micro_batch, stage))
        if saved.loan is not None:
            saved.loan.renew(self._borrowed(action))
        is_lent = stage in self._schedule.placement.lent
        sums: Gradients = {} if is_lent else self._states[stage].gradient_sum
        grad_input = backward(saved, self._output_gradient(micro_batch, stage), sums)
        if saved.loan is not None:
            saved.loan.give_back()
        if stage > 0:
            self._gradients[micro_batch] = grad_input
        if is_lent:
            self._for_owner[micro_batch, stage] = sums
        else:
            self._close_sum(action)
        return self._in_ledger(action, saved)

    def _add(self, action: Action) -> Action:
        micro_batch, stage = _compute_of(action)
        own = self._for_owner.pop((micro_batch, stage), None)
        if own is None:
            self._states[stage].add_gradients(self._taken(action))
        else:
            self._states[stage].add_gradients(own)
        self._close_sum(action)
        return action

    def _close_sum(self, action: Action) -> None:
        if self._schedule.placement.completes_sum(action):
            assert action.micro_batch is not None
            self._states[action.stage].close_sum(self._schedule.mode.version_made(action.micro_batch))

    def _update(self, action: Action) -> Action:
        version, state = _version_of(action), self._states[action.stage]
        self._receive_total(action)
        factor, keep_total = self._settings.learning_rate_factor(version - 1), action.payload is Payload.TOTAL
        state.update(factor, keep_total, is_last_use=action in self._last_uses)
        if all(other.current >= version for other in self._states.values()):
            self._feed.release(version - 1)
            self._finished.append(StepResult(version - 1, self._losses.of(version - 1)))
        return action.at_version(state.current)

    def _free(self, action: Action) -> Action:
        state, version = self._states[action.stage], _version_of(action)
        if action.payload is Payload.TOTAL:
            state.free_total(version)
        else:
            state.free(version)
        return action

    def _send(self, action: Action) -> Action:
        assert self._mailbox is not None
        size = self._mailbox.send(action, self._payload(action))
        if size and self._tracer.active:
            self._tracer.sent(action, size)
        return action

    def _payload(self, action: Action) -> Mapping[str, Tensor]:
        """Return what a SEND sends; activations and gradients are not kept, unless exchanged."""
        stage, m = action.stage, action.micro_batch
        if action.payload is Payload.PARAMETERS:
            return self._states[stage].read(_version_of(action)).tensors
        if action.payload is Payload.TOTAL:
            self._receive_total(action)
            return self._states[stage].total(_version_of(action)) or {}
        assert m is not None
        if action.payload is Payload.ACTIVATIONS:
            return {VALUE: self._outputs.pop(m)}
        if action.payload is Payload.INPUT_GRADIENTS:
            gradient = self._gradients.pop(m)
            return {} if gradient is None else {VALUE: gradient}
        if action.payload is Payload.BUFFERS:
            return self._buffers[stage].of[m % self._micro_batches]
        if self._schedule.placement.is_exchanged(m, stage):
            return self._states[stage].gradient_sum
        return self._gradients_of(m, stage)

    def _receive(self, action: Action) -> Action:
        assert self._mailbox is not None
        self._mailbox.post(action)
        return action

    def _collective(self, action: Action) -> Action:
        assert self._mailbox is not None and action.micro_batch is not None
        if action.payload is Payload.PARAMETERS:
            brought = self._states[action.stage].read(_version_of(action)).tensors
        else:
            brought = self._gradients_of(action.micro_batch, action.stage)
        size = self._mailbox.join(action, brought)
        if self._tracer.active and (sent := ring_bytes(action, size, self._schedule.ranks)):
            self._tracer.sent(action, sent)
        return action

    def _gradients_of(self, micro_batch: int, stage: int) -> Gradients:
        """Return the gradients of a micro-batch, or the sum up to it, which are not kept."""
        if stage in self._schedule.placement.lent:
            return self._for_owner.pop((micro_batch, stage))
        return self._states[stage].take_sum()

    def _take(self, key: MessageKey) -> dict[str, Tensor] | None:
        return None if self._mailbox is None else self._mailbox.take(key)

    def _taken(self, action: Action) -> dict[str, Tensor]:
        """Return what an ADD waits for, all parts of it; what has no bytes was never sent."""
        taken: dict[str, Tensor] = {}
        for key in consumed(action, self._micro_batches):
            taken |= self._take(key) or {}
        return taken

    def _input(self, micro_batch: int, stage: int) -> Tensor:
        """Return the output of the stage before, made here or received."""
        if micro_batch in self._outputs:
            return self._outputs.pop(micro_batch)
        assert self._mailbox is not None
        received = self._take((Payload.ACTIVATIONS, stage - 1, micro_batch, None, None))
        assert received is not None, "the program of a validated schedule has sent it"
        return received[VALUE].requires_grad_(self._mailbox.requires_grad(stage - 1))

    def _output_gradient(self, micro_batch: int, stage: int) -> Tensor | None:
        """Return the gradient of the stage's output, made here or received; None if there is none."""
        if micro_batch in self._gradients:
            return self._gradients.pop(micro_batch)
        received = self._take((Payload.INPUT_GRADIENTS, stage + 1, micro_batch, None, None))
        return None if received is None else received[VALUE]

    def _receive_buffers(self, stage: int, micro_batch: int) -> None:
        """Take over a worker's buffers after `micro_batch`, if another rank has sent them."""
        received = self._take((Payload.BUFFERS, stage, micro_batch, None, None))
        if received is not None:
            own = self._buffers[stage].of[micro_batch % self._micro_batches]
            own.update((name, tensor.clone()) for name, tensor in received.items())  # not as parts of one buffer

    def _receive_total(self, action: Action) -> None:
        """Keep the total that `action` needs, if it is not here yet."""
        state, version = self._states[action.stage], _version_of(action)
        if state.total(version) is None:
            state.keep_total(version, self._take((Payload.TOTAL, action.stage, None, version, None)) or {})

    def _read(self, action: Action) -> tuple[Version, Loan | None]:
        """Return the parameters that a forward reads: the rank's own, or what was brought to it."""
        stage = action.stage
        if not self._schedule.placement.borrows(self._rank, stage):
            return self._states[stage].read(_version_of(action)), None
        tensors = self._borrowed(action)
        for name, requires_grad in self._compute[stage].parameters:
            tensors[name].requires_grad_(requires_grad)
        return Version(_version_of(action), tensors), Loan(tensors)

    def _borrowed(self, action: Action) -> dict[str, Tensor]:
        return self._take((Payload.PARAMETERS, action.stage, action.micro_batch, action.version, None)) or {}

    def _live_versions(self) -> list[int]:
        stages = range(self._schedule.stages)
        return [len(self._states[stage].versions) if stage in self._states else 0 for stage in stages]

    def _in_ledger(self, action: Action, saved: SavedForward) -> Action:
        """Enter the version that was really used in the ledger; return the action as it was executed."""
        micro_batch, stage = _compute_of(action)
        step, worker = divmod(micro_batch, self._micro_batches)
        self._ledger.record(action.op, step, worker, stage, saved.version.number)
        return action.at_version(saved.version.number)


def _last_uses(slot: Slot) -> set[Action]:
    """Return the updates right after which the program frees the version that they start from."""
    return {
        update
        for update, free in pairwise(slot.actions)
        if update.op is Op.UPDATE and free.op is Op.FREE and free.payload is None and update.stage == free.stage
        and free.version == _version_of(update) - 1
    }  # fmt: skip


def _compute_of(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None
    return action.micro_batch, action.stage


def _version_of(action: Action) -> int:
    assert action.version is not None
    return action.version
