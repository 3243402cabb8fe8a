"""The second interpreter: runs a rank's program on tensors, action by action. There is no other loop.

Each action states its own meaning. The executor waits for the values that the action reads, runs the action, keeps the
values that it writes, and drops those that it frees.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from cdp_repro.engine.batches import Feed
from cdp_repro.engine.compute import Gradients, SavedForward, StageCompute, Version
from cdp_repro.engine.holdings import Holdings
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.loan import Loan
from cdp_repro.engine.losses import Losses
from cdp_repro.engine.mailbox import Mailbox, Pending
from cdp_repro.engine.prefix import Prefix
from cdp_repro.engine.randomness import seeded
from cdp_repro.engine.split_backward import WeightWork, backward_input
from cdp_repro.engine.tracing import Tracer
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Action, Op, RankProgram, Slot, Value
from cdp_repro.schedule.program import Upcoming
from cdp_repro.schedule.values import (
    BUFFERS,
    GRADIENTS,
    INPUT,
    LENT_BACKWARD,
    LENT_FORWARD,
    OUTPUT_GRADIENT,
    PARAMETERS,
    PREFIX,
    PREFIX_GRADIENT,
    SAVED,
    WEIGHT_WORK,
)
from cdp_repro.trace.rings import ring_bytes


@dataclass(frozen=True)
class StepResult:
    """A training step whose updates are all done on this rank."""

    step: int
    loss_tensor: Tensor
    """[M/R]: mean losses of the R micro-batches that a worker computes at once, each on its own rank. On ranks other
    than 0, a number is nan unless the rank computes the last stage for all R."""

    @property
    def losses(self) -> list[float]:
        """`loss_tensor` as numbers. Waits for the device."""
        losses: list[float] = self.loss_tensor.tolist()
        return losses


class Executor:
    """Executes the program of one rank, from a drained state to a drained state.

    `values` are all present values, by name. Between two runs they are the parameter versions and buffers that the rank
    holds; within a run also saved forwards, inputs, gradients and sums. A value that a message will bring is `Pending`.
    """

    def __init__(
        self,
        program: RankProgram,
        holdings: Holdings,
        compute: Sequence[StageCompute],
        tracer: Tracer,
        team: Team,
        seed: int,
        learning_rate_factor: Callable[[int], float],
    ) -> None:
        """`learning_rate_factor`: training step -> factor on the optimizer's learning rate in its updates."""
        schedule = program.schedule
        self.program = program
        self.values = holdings.values
        self.ledger = Ledger(schedule)
        self.mailbox: Mailbox | None = None
        """None on a single device, and until the layouts of messages are known."""
        self._losses = Losses(schedule, team)
        self._states, self._compute, self._clipping, self._tracer = holdings.states, compute, holdings.clipping, tracer
        self._team, self._seed, self._learning_rate_factor = team, seed, learning_rate_factor
        self._sizes, self._last_stage, self._stashes = schedule.sizes, schedule.stages - 1, program.stashes
        self._finishing_kinds, self._finishing_count = program.finishing
        self._done: Counter[int] = Counter()
        """By training step: number of actions run of the kinds whose last one finishes the step on this rank."""
        self._finished: deque[tuple[int, int]] = deque()
        """Training steps finished on this rank, each with the slot in which the last loss of it is computed."""
        self._losses_late = 0 if team.rank else program.losses_late
        self._handlers = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHTS: self._backward_weights,
            Op.ADD: self._add,
            Op.UPDATE: self._update,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.COLLECTIVE: self._collective,
        }

    def run(self, first_step: int, upcoming: Upcoming, feed: Feed) -> Iterator[StepResult]:
        """Run the program from `first_step` as long as steps are `upcoming`, then its drain.

        Yields the training steps that finish on this rank. `feed` has the mini-batches of the steps that have begun.
        """
        for slot in self.program.replay(first_step, upcoming):
            self._tracer.enter(slot, feed.begun)
            yield from self._execute(slot, feed)
        yield from self._finish()

    def _execute(self, slot: Slot, feed: Feed) -> list[StepResult]:
        """Run the actions of one slot; return the training steps that they finish on this rank."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are switched off around the training, or in the loop over its results: leave no_grad() and "
                "inference_mode() before the next step, and undo set_grad_enabled(False)"
            )
        self._team.positions.enter("slot", slot)
        self._feed, self._slot = feed, slot.number
        doing: object = f"waiting, in slot {slot.number}, for a rank that has not yet taken what was sent"
        try:
            if self.mailbox is not None:
                self.mailbox.begin(slot)
            for action in slot.actions:
                doing = action
                self._run(action)
            doing = f"waiting, after slot {slot.number}, for the losses of a training step"
            # not earlier: rank 0 waits for losses of other ranks, which may wait for messages of this slot
            return self._results(slot.number)
        except Exception as error:
            what = f"running {doing.label} in slot {slot.number}" if isinstance(doing, Action) else doing
            self._team.positions.note(error, what)
            raise

    def _results(self, slot: float) -> list[StepResult]:
        """Return the finished steps of which all losses are computed by a slot; on rank 0, wait for the losses."""
        results = []
        while self._finished and self._finished[0][1] <= slot:
            step, _ = self._finished.popleft()
            results.append(StepResult(step, self._losses.mean_losses(step)))
        return results

    def _finish(self) -> list[StepResult]:
        """End a run: take in pending values for the next one, and wait until everything has been sent.

        Returns the steps whose losses other ranks have computed since this rank's last slot.
        """
        with self._team.positions.noting("draining"):
            results = self._results(math.inf)
            for value in self.values:
                self._read(value)
            if self._clipping is not None:
                self._clipping.flush()
            if self.mailbox is not None:
                self.mailbox.flush()
            self._losses.flush()
        return results

    def _run(self, action: Action) -> None:
        traced = self._tracer.active
        begin = self._tracer.now() if traced else 0.0
        if profiler._is_profiler_enabled:
            with profiler.record_function(action.label):
                self._handlers[action.op](action)
        else:
            self._handlers[action.op](action)
        if action.op in self._finishing_kinds:
            self._count(action)
        if self._clipping is not None and action.op.sums_gradients:
            for value in action.writes:
                if value.kind == GRADIENTS:
                    self._clipping.enter(value, self.values[value])
        for value in action.frees:
            if value not in action.writes:  # buffers are read and written under one name
                self.values.pop(value, None)  # handlers have already removed values that they pass on
        if traced:
            held = Counter(value.stage for value in self.values if value.kind == PARAMETERS)
            self._tracer.record(action, [held[stage] for stage in range(self._last_stage + 1)], begin)

    def _take(self, value: Value) -> Any:
        """Remove and return a value, after waiting for the message that brings it."""
        self._read(value)
        return self.values.pop(value)

    def _read(self, value: Value) -> Any:
        """Return a value, after waiting as `_take` does, but keep it."""
        content = self.values[value]
        if isinstance(content, Pending):
            content = self.values[value] = content.get()
        return content

    def _forward(self, action: Action) -> None:
        stage, (step, i) = action.stage, divmod(action.micro_batch, self._sizes.micro_batches)
        read = {value.kind: value for value in action.reads}
        written = {value.kind: value for value in action.writes}
        batch = self._feed[step]
        is_last = stage == self._last_stage
        inputs = [self._take(value) for value in _in_order(action.reads, INPUT)] or [batch.inputs(i)]
        version, is_lent = self._parameters(action, read, LENT_FORWARD), LENT_FORWARD in read
        # else the graph would keep parameters that the backward brings, or reads in another version
        loan = Loan(version.tensors, is_copy=is_lent) if is_lent or not self._stashes else None
        self.ledger.record(action, version.number)
        buffers = self._take(read[BUFFERS])
        prefix = self._take(read[PREFIX]) if PREFIX in read else Prefix() if PREFIX in written else None
        with seeded(self._team.device, self._seed, step, i, stage):
            output, saved = self._compute[stage].forward(
                version, buffers, inputs, batch.targets(i) if is_last else None, self._tracer.meter, loan, prefix
            )
        if loan is not None:
            loan.give_back()
        self.values[written[SAVED]] = saved
        self.values[written[BUFFERS]] = buffers
        if PREFIX in written:
            assert prefix is not None
            self.values[written[PREFIX]] = prefix.take_after()
        if is_last:
            self._losses.enter(step, i, output)
            # each micro-batch is weighted here, so that gradients only need to be added
            self.values[written[OUTPUT_GRADIENT]] = torch.full_like(output, self._sizes.gradient_weight)
        else:
            self.values[written[INPUT]] = output.requires_grad_(saved.edge is not None)

    def _saved(self, action: Action, read: Mapping[str, Value]) -> tuple[SavedForward, Version]:
        """Return what a forward has saved, and the parameters that its backward reads."""
        saved: SavedForward = self._take(read[SAVED])
        version = saved.version
        if saved.loan is not None:
            version = self._parameters(action, read, LENT_BACKWARD)
            saved.loan.renew(version.tensors)
        self.ledger.record(action, version.number)
        return saved, version

    def _backward(self, action: Action) -> None:
        read = {value.kind: value for value in action.reads}
        saved, version = self._saved(action, read)
        sums: Gradients = self._take(read[GRADIENTS]) if GRADIENTS in read else {}
        grad_output = self._take(read[OUTPUT_GRADIENT])
        later = self._take(read[PREFIX_GRADIENT]) if PREFIX_GRADIENT in read else None
        gradients = self._compute[action.stage].backward(saved, grad_output, sums, version, later)
        if saved.loan is not None:
            saved.loan.give_back()
        for value in action.writes:
            if value.kind == PREFIX_GRADIENT:
                assert saved.prefix is not None
                self.values[value] = saved.prefix.take_gradients()
            elif value.kind == GRADIENTS:
                self.values[value] = sums
        self._pass_on(action, gradients)

    def _backward_input(self, action: Action) -> None:
        read = {value.kind: value for value in action.reads}
        saved, version = self._saved(action, read)
        gradients, work = backward_input(self._compute[action.stage], saved, self._take(read[OUTPUT_GRADIENT]), version)
        self.values.update((value, work) for value in action.writes if value.kind == WEIGHT_WORK)
        self._pass_on(action, gradients)

    def _pass_on(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a stage's inputs for the stages that made the inputs; data needs none."""
        made = _in_order(action.writes, OUTPUT_GRADIENT)
        self.values.update(zip(made, gradients, strict=bool(made)))

    def _backward_weights(self, action: Action) -> None:
        read = {value.kind: value for value in action.reads}
        sums: Gradients = self._take(read[GRADIENTS]) if GRADIENTS in read else {}
        work: WeightWork = self._take(read[WEIGHT_WORK])
        work.finish(sums)
        self.values[action.writes[0]] = sums

    def _add(self, action: Action) -> None:
        """Add the earlier sum into the later one, which is copied if still needed; a sum may come in parts."""
        sums: dict[Value, Gradients] = {}
        for value in action.reads:
            self._read(value)  # all parts, before any is copied: they lie in one buffer
        for value in action.reads:
            content = self._take(value) if value in action.frees else _copied(self._read(value))
            sums.setdefault(value.whole, {}).update(content)
        earlier, later = sums.values()
        for name, gradient in earlier.items():
            present = later.get(name)
            later[name] = gradient if present is None else present.add_(gradient)
        (total,) = action.writes
        self.values[total] = later

    def _update(self, action: Action) -> None:
        read, (after,) = {value.kind: value for value in action.reads}, action.writes
        before, total = read[PARAMETERS], read[GRADIENTS]
        version: Version = self._read(before)
        gradients, step = self._read(total), version.number // self._sizes.updates
        factor = self._learning_rate_factor(step)

        def update() -> Version:
            with seeded(self._team.device, self._seed, "update", version.number, action.stage):  # an optimizer's noise
                return self._states[action.stage].update(
                    version,
                    gradients,
                    factor,
                    in_place=before in action.frees,
                    gradients_are_ours=total in action.frees,
                )

        is_late = self._clipping is not None and self._clipping.is_late
        # the norm for clipping may not be known before the version is first read
        self.values[after] = Pending(update) if is_late else update()

    def _count(self, action: Action) -> None:
        """Count an action of a training step of a finishing kind; the last one finishes the step on this rank."""
        is_update, sizes = action.op is Op.UPDATE, self._sizes
        step = (action.version - 1) // sizes.updates if is_update else action.micro_batch // sizes.micro_batches
        self._done[step] += 1
        if self._done[step] == self._finishing_count:
            del self._done[step]
            self._feed.release(step)
            self._finished.append((step, self._slot + self._losses_late))

    def _send(self, action: Action) -> None:
        assert self.mailbox is not None and action.value is not None
        content = self._read(action.reads[0])
        if isinstance(content, Version):
            content = content.read_in(action.value.number // self._sizes.summed)
        size = self.mailbox.send(action.value, action.peer, content)
        if size and self._tracer.active:
            self._tracer.sent(action, size)

    def _receive(self, action: Action) -> None:
        assert self.mailbox is not None and action.value is not None
        self.values[action.value] = self.mailbox.receive(action.value, action.peer)

    def _collective(self, action: Action) -> None:
        assert self.mailbox is not None and action.value is not None
        self.values[action.value], size = self.mailbox.join(action.value, self._read(action.reads[0]))
        if self._tracer.active and (sent := ring_bytes(action, size, self._team.size)):
            self._tracer.sent(action, sent)

    def _parameters(self, action: Action, read: Mapping[str, Value], lent: str) -> Version:
        """Return the parameters that a forward or backward reads: a lent copy, or the rank's own."""
        if lent in read:
            copy: Version = self._take(read[lent])
            return copy
        own: Version = self._read(read[PARAMETERS])
        return own.read_in(action.micro_batch // self._sizes.summed)


def _in_order(values: Sequence[Value], kind: str) -> list[Value]:
    """Return the values of a kind in the order of their stages, which is the order of a stage's inputs."""
    return sorted(value for value in values if value.kind == kind)


def _copied(gradients: Gradients) -> Gradients:
    return {name: gradient.clone() for name, gradient in gradients.items()}
