"""The second interpreter: runs a rank's program on tensors, action by action. There is no other loop.

Each action states its own meaning. The executor waits for the values that the action reads, lets go of those that
it frees, runs the action, and keeps the values that it writes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from cdp_repro.engine.batches import Feed, one_tensor
from cdp_repro.engine.clipping import Clipping
from cdp_repro.engine.compute import Gradients, SavedForward, StageCompute, Version
from cdp_repro.engine.holdings import Holdings
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.loan import Loan
from cdp_repro.engine.losses import Losses
from cdp_repro.engine.mailbox import Mailbox, Pending
from cdp_repro.engine.prefix import Prefix
from cdp_repro.engine.randomness import seeded
from cdp_repro.engine.split_backward import backward_input
from cdp_repro.engine.tracing import Tracer
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Action, Op, RankProgram, Slot, Value
from cdp_repro.schedule.values import Kind
from cdp_repro.trace.rings import ring_bytes


@dataclass(frozen=True)
class StepResult:
    """A training step whose updates this rank has run; of clipped ones, some may still wait for a norm."""

    step: int
    loss_tensor: Tensor
    """[M/R]: mean losses of the R micro-batches that a worker computes at once, each on its own rank. On ranks other
    than 0, a number is nan unless the rank computes the last stage for all R."""

    @property
    def losses(self) -> list[float]:
        """`loss_tensor` as numbers. Waits for the device."""
        losses: list[float] = self.loss_tensor.tolist()
        return losses


Contents = dict[Kind, list[Any]]
"""What an action reads, or makes: the contents of its values by kind, in the order of their stages."""


class Executor:
    """Executes the program of one rank, from a drained state to a drained state.

    `values` are all present values, by name. Between two runs they are the parameter versions and buffers that the rank
    holds; within a run also saved forwards, inputs, gradients and sums. A value is `Pending` that a message, a
    collective, or an update that waits for a norm has still to bring.
    """

    def __init__(
        self,
        program: RankProgram,
        holdings: Holdings,
        compute: Sequence[StageCompute],
        tracer: Tracer,
        clipping: Clipping | None,
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
        self._states, self._compute, self._clipping, self._tracer = holdings.states, compute, clipping, tracer
        self._team, self._seed, self._learning_rate_factor = team, seed, learning_rate_factor
        self._sizes, self._last_stage, self._stashes = schedule.sizes, schedule.stages - 1, program.stashes
        self._finishing_kinds, self._finishing_count = program.finishing
        self._done: Counter[int] = Counter()
        """By training step: how many have run of the actions of which the last finishes the step on this rank."""
        self._finished: deque[tuple[int, int]] = deque()
        """Training steps finished on this rank, each with the slot after which it is returned: on rank 0, when all its
        losses have been computed."""
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

    def run(self, feed: Feed) -> Iterator[StepResult]:
        """Run the program from the first step of `feed` as long as that begins steps, then its drain.

        Yields the training steps that finish on this rank.
        """

        def upcoming() -> bool:
            with self._team.positions.noting("ending the run"):
                return feed.begin_step()

        self._tracer.begin_run(self.program.next_slot, feed.first_step)
        for slot in self.program.replay(feed.first_step, upcoming):
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
        """Return the finished steps that are due after a slot; rank 0 waits for their losses."""
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
        with profiler.record_function(action.label) if profiler._is_profiler_enabled else nullcontext():
            made = self._handlers[action.op](action, self._take(action))
        for value in sorted(action.writes):
            self.values[value] = made[value.kind].pop(0)
        if action.op in self._finishing_kinds:
            self._count(action)
        if self._clipping is not None and action.op.sums_gradients:
            for value in action.writes:
                if value.kind == Kind.GRADIENTS:
                    self._clipping.enter(value, self.values[value])
        if traced:
            held = Counter(value.stage for value in self.values if value.kind == Kind.PARAMETERS)
            self._tracer.record(action, [held[stage] for stage in range(self._last_stage + 1)], begin)

    def _take(self, action: Action) -> Contents:
        """Return what an action reads, after waiting for it; what the action frees is held here no longer."""
        read: Contents = defaultdict(list)
        for value in sorted(action.reads):
            read[value.kind].append(self._read(value))
            if value in action.frees:
                del self.values[value]
        return read

    def _read(self, value: Value) -> Any:
        """Return a value, after waiting for the message that brings it."""
        content = self.values[value]
        if isinstance(content, Pending):
            content = self.values[value] = content.get()
        return content

    def _forward(self, action: Action, read: Contents) -> Contents:
        stage, (step, i) = action.stage, divmod(action.micro_batch, self._sizes.micro_batches)
        batch, is_last = self._feed[step], stage == self._last_stage
        inputs, (buffers,) = read[Kind.INPUT] or [one_tensor(batch.inputs(i))], read[Kind.BUFFERS]
        (prefix,) = read[Kind.PREFIX] or [Prefix() if self._sizes.slices > 1 else None]
        version, is_lent = self._parameters(action, read), bool(read[Kind.LENT_FORWARD])
        # else the graph would keep parameters that the backward brings, or reads in another version
        loan = Loan(version.tensors, is_copy=is_lent) if is_lent or not self._stashes else None
        self.ledger.record(action, version.number)
        with seeded(self._team.device, self._seed, step, i, stage):
            output, saved = self._compute[stage].forward(
                version, buffers, inputs, batch.targets(i) if is_last else None, self._tracer.meter, loan, prefix
            )
        if loan is not None:
            loan.give_back()
        made: Contents = {Kind.SAVED: [saved], Kind.BUFFERS: [buffers]}
        if prefix is not None:
            made[Kind.PREFIX] = [prefix.take_after()]  # after the last tokens, nothing takes it from here
        if not is_last:
            return made | {Kind.INPUT: [output.requires_grad_(saved.edge is not None)]}
        self._losses.enter(step, i, output)
        # each micro-batch is weighted here, so that gradients only need to be added
        return made | {Kind.OUTPUT_GRADIENT: [torch.full_like(output, self._sizes.gradient_weight)]}

    def _saved(self, action: Action, read: Contents) -> SavedForward:
        """Return what a forward has saved, with the parameters that its backward reads."""
        saved: SavedForward = read[Kind.SAVED][0]
        version = saved.version
        if saved.loan is not None:
            version = self._parameters(action, read)
            saved.loan.renew(version.tensors)
        self.ledger.record(action, version.number)
        return saved

    def _backward(self, action: Action, read: Contents) -> Contents:
        saved = self._saved(action, read)
        (sums,), (later,) = read[Kind.GRADIENTS] or [{}], read[Kind.PREFIX_GRADIENT] or [None]
        gradients = self._compute[action.stage].backward(saved, read[Kind.OUTPUT_GRADIENT][0], sums, later)
        if saved.loan is not None:
            saved.loan.give_back()
        of_prefix = saved.prefix and saved.prefix.take_gradients()
        return {Kind.OUTPUT_GRADIENT: gradients, Kind.GRADIENTS: [sums], Kind.PREFIX_GRADIENT: [of_prefix]}

    def _backward_input(self, action: Action, read: Contents) -> Contents:
        saved = self._saved(action, read)
        gradients, work = backward_input(self._compute[action.stage], saved, read[Kind.OUTPUT_GRADIENT][0])
        return {Kind.OUTPUT_GRADIENT: gradients, Kind.WEIGHT_WORK: [work]}

    def _backward_weights(self, _: Action, read: Contents) -> Contents:
        (work,), (sums,) = read[Kind.WEIGHT_WORK], read[Kind.GRADIENTS] or [{}]
        work.finish(sums)
        return {Kind.GRADIENTS: [sums]}

    def _add(self, action: Action, read: Contents) -> Contents:
        """Add the earlier sum into the later one; what is still needed of either is copied. A sum may come in parts."""
        sums: dict[Value, Gradients] = {}
        for value, content in zip(sorted(action.reads), read[Kind.GRADIENTS], strict=True):
            sums.setdefault(value.whole, {}).update(content if value in action.frees else _copied(content))
        earlier, later = sums.values()
        for name, gradient in earlier.items():
            present = later.get(name)
            later[name] = gradient if present is None else present.add_(gradient)
        return {Kind.GRADIENTS: [later]}

    def _update(self, action: Action, read: Contents) -> Contents:
        (version,), (gradients,) = read[Kind.PARAMETERS], read[Kind.GRADIENTS]
        freed = {value.kind for value in action.frees}
        factor = self._learning_rate_factor(version.number // self._sizes.updates)

        def update() -> Version:
            clipped = None if self._clipping is None else self._clipping.clipped(version.number + 1, gradients)
            with seeded(self._team.device, self._seed, "update", version.number, action.stage):  # an optimizer's noise
                return self._states[action.stage].update(
                    version,
                    gradients if clipped is None else clipped,
                    factor,
                    in_place=Kind.PARAMETERS in freed,
                    gradients_are_ours=clipped is not None or Kind.GRADIENTS in freed,
                )

        is_late = self._clipping is not None and self._clipping.is_late
        # the norm for clipping may not be known before the version is first read
        return {Kind.PARAMETERS: [Pending(update) if is_late else update()]}

    def _count(self, action: Action) -> None:
        """Count an action of a training step of a finishing kind; the last one finishes the step on this rank."""
        is_update, sizes = action.op is Op.UPDATE, self._sizes
        step = (action.version - 1) // sizes.updates if is_update else action.micro_batch // sizes.micro_batches
        self._done[step] += 1
        if self._done[step] == self._finishing_count:
            del self._done[step]
            self._feed.release(step)
            self._finished.append((step, self._slot + self._losses_late))

    def _send(self, action: Action, read: Contents) -> Contents:
        assert self.mailbox is not None and action.value is not None
        ((content,),) = read.values()
        if isinstance(content, Version):
            content = content.read_in(action.value.number // self._sizes.summed)
        self._tracer.sent(action, self.mailbox.send(action.value, action.peer, content))
        return {}

    def _receive(self, action: Action, _: Contents) -> Contents:
        assert self.mailbox is not None and action.value is not None
        return {action.value.kind: [self.mailbox.receive(action.value, action.peer)]}

    def _collective(self, action: Action, read: Contents) -> Contents:
        assert self.mailbox is not None and action.value is not None
        ((content,),) = read.values()
        pending, size = self.mailbox.join(action.value, content)
        self._tracer.sent(action, ring_bytes(action, size, self._team.size))
        return {action.value.kind: [pending]}

    def _parameters(self, action: Action, read: Contents) -> Version:
        """Return the parameters that a forward or backward reads: a lent copy as it was sent, or the rank's own."""
        version: Version = (read[Kind.LENT_FORWARD] or read[Kind.LENT_BACKWARD] or read[Kind.PARAMETERS])[0]
        return version.read_in(action.micro_batch // self._sizes.summed)


def _copied(gradients: Gradients) -> Gradients:
    return {name: gradient.clone() for name, gradient in gradients.items()}
