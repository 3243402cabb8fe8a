"""The engine, on which other code builds. It ties together a program, the state of the stages and the executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack
from zlib import crc32

import torch
from torch import Tensor, nn

from cdp_repro.engine.arguments import check_functions, check_stages, refuse_shared_parameters
from cdp_repro.engine.batches import Feed, MiniBatch, SlicedMiniBatch, TensorMiniBatch, one_tensor, tensors_of
from cdp_repro.engine.clipping import Clipping
from cdp_repro.engine.compute import Autocast, LossFn, Network
from cdp_repro.engine.delay import DelayFactory, Uncorrected
from cdp_repro.engine.delivery import needs_batches
from cdp_repro.engine.ending import Ending
from cdp_repro.engine.executor import Executor, StepResult
from cdp_repro.engine.holdings import Holdings
from cdp_repro.engine.mailbox import Mailbox
from cdp_repro.engine.messages import layouts_of
from cdp_repro.engine.outputs import TestBatches, outputs_of, pipelined_outputs
from cdp_repro.engine.parameters import OptimizerFactory
from cdp_repro.engine.prefix import check_causal
from cdp_repro.engine.tracing import Tracer
from cdp_repro.launch.team import Team
from cdp_repro.models.chain import joined
from cdp_repro.schedule import Program, RankProgram, Schedule
from cdp_repro.schedule.forward_only import is_pipelined
from cdp_repro.schedule.schedule_spec import Choices
from cdp_repro.schedule.values import Kind
from cdp_repro.trace import Trace
from cdp_repro.trace.record import as_plain, from_plain


class Engine:
    """Trains a model cut into stages, on the timeline and by the update rule of `mode`.

        engine = Engine(stages=[...], loss_fn=F.cross_entropy, mode="cdp_v2",
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        for result in engine.run(batches):
            print(result.step, result.losses)
        engine.model().eval()

    Args:
        stages: modules in forward order. Each returns one tensor, [micro-batch, ...], and takes one, or several if
            `sources` say that it reads several outputs. A stage must not change its inputs in place. The parameters of
            the stages become the initial version of the engine.
        loss_fn: (output of the last stage, targets) -> scalar mean over the micro-batch.
        optimizer: makes the optimizer of a stage from the list of its trainable parameters. With shards (see
            `Spec.collectives`), the optimizer updates a rank's pieces of them, [values, 1, ..., 1], in the same groups:
            it must treat each value independently, as SGD and Adam do.
        mode: "dp", "cdp_v1", "cdp_v2", another name in `schedule.MODES`, or a staleness matrix with a row for each
            micro-batch of a training step (one for all replicas of it) and a column for each stage.
        placement: where the stages run and who holds their parameters: "single_device", "replicated", "zero",
            "model_parallel", "pipeline" or "parameter_server". All except the first need as many processes in the
            torch.distributed group as the schedule has ranks. Each process builds the same engine and takes part in
            every call.
        workers: N, the workers that take the micro-batches in turn: N micro-batches are under way at once (pipelines
            that flush use N only to give M). Default: the number of stages.
        slot_order: how a device orders the actions of a slot, "paper" or "backward_first".
        device: where the stages are moved.
        seed: seeds, with step, micro-batch and stage, the random numbers of the stages in training (dropout).
        learning_rate_factor: step -> factor on the optimizer's learning rate in the update (or updates) of that
            training step (a schedule).
        delay: makes the method against delay of a stage from the staleness of its micro-batches, e.g. `ErrorFeedback`
            of `engine.delay`. Stages must be held whole.
        clip_norm: largest norm of the mean gradient of a training step. The norm is taken over all stages if all
            reads are of the newest complete version or all are older, as in "dp" and "cdp_v1"; else, as in "cdp_v2",
            over each stage separately, since a micro-batch may read a stage before all gradients are complete.
        autocast: makes the context in which forwards run, e.g. `lambda: torch.autocast("cpu", torch.bfloat16)`.
        traced_steps: number of training steps, from the first on, whose actions and live activation bytes are recorded;
            None: until the timeline repeats itself, at least 3.
        program: runs instead of the one that mode, placement, workers, slot_order and `choices` would give; those are
            then ignored.
        choices: the other fields of `Spec`: accumulate, replicas, sources, ...

    Raises:
        ValueError: stages that are not a list of modules, sizes that do not fit, parameters that two stages share or
            that have hooks, an optimizer with a learning-rate scheduler, a number of processes other than of ranks.
        ScheduleError: a staleness that the timeline cannot serve.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        mode: str | Sequence[Sequence[int]] = "cdp_v2",
        placement: str = "single_device",
        *,
        workers: int | None = None,
        slot_order: str = "paper",
        device: torch.device | str = "cpu",
        seed: int = 0,
        learning_rate_factor: Callable[[int], float] = lambda _: 1.0,
        delay: DelayFactory = Uncorrected,
        clip_norm: float | None = None,
        autocast: Autocast = nullcontext,
        traced_steps: int | None = 0,
        program: Program | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        check_stages(stages)
        check_functions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            delay=delay,
            learning_rate_factor=learning_rate_factor,
            autocast=autocast,
        )
        if traced_steps is not None and (type(traced_steps) is not int or traced_steps < 0):
            raise ValueError(f"traced_steps={traced_steps!r}: use a whole number from 0, or None")
        refuse_shared_parameters(stages)
        count = len(stages)
        if program is None:
            together = count if workers is None else workers
            sizes = [sum(each.nbytes for each in stage.parameters() if each.requires_grad) for stage in stages]
            program = Program(
                Schedule.build(mode, together, count, placement, slot_order, gradient_bytes=sizes, **choices)
            )
        self.schedule = program.schedule
        if self.schedule.stages != count:
            raise ValueError(f"the program is for {self.schedule.stages} stages, not for {count}: give as many")
        check_causal(stages, self.schedule.sizes.slices)
        self.team = Team(self.schedule.ranks, torch.device(device), str(self.schedule))
        self.rank = self.team.rank
        """The rank of this process; 0 on a single device."""
        self.learning_rate_factor = learning_rate_factor
        self._stages = joined(stages, self.schedule.sizes.sources)
        self._stages.zero_grad()  # remove gradients that another engine may have left
        self._stages.to(self.team.device)
        clips = None if clip_norm is None else Clipping(clip_norm, program, self.team)
        self._network = Network([*self._stages], loss_fn, autocast, self.schedule.sizes.sources)
        self._holdings = Holdings(self.schedule, self._network.stages, self.team, optimizer, delay)
        self._fill = program.steady_step
        steps = max(3, self._fill + 1) if traced_steps is None else traced_steps
        self._tracer = Tracer(self.schedule, self.team, steps)
        self._executor = Executor(
            RankProgram(program, self.rank, needs_batches(self.team.device)),
            self._holdings,
            self._network.compute(self.schedule.timeline.splits_backward),
            self._tracer,
            clips,
            self.team,
            seed,
            learning_rate_factor,
        )
        matrix = crc32(repr(self.schedule.rule.matrix).encode())
        self._settings = {**vars(self.schedule.spec), "seed": seed, "clip_norm": clip_norm, "staleness": f"{matrix:x}"}
        """What must be the same on all ranks, and does not show in messages."""
        self._runs = 0
        self._undrained: str | None = None
        self.step = 0

    def run(self, batches: Iterable[tuple[Tensor, Tensor] | MiniBatch]) -> Generator[StepResult, None, None]:
        """Train on `batches`, one per training step, and yield each step when its updates are done on this rank.

        A batch is (inputs [B, ...], targets [B, ...]) or cuts itself into micro-batches. It is taken when its first
        forward is about due. Up to two steps are under way, or N if each micro-batch is a step. At the end of the
        batches, or when the iterator is closed early (a `break`), the pipeline drains: steps that have begun are
        finished, but after a `break` their losses are lost. All ranks end after the same step, the last that any rank
        has begun: a rank that has left continues with its batches until then. A later call continues where this one
        ended. How the steps are split into calls does not change any number. If `batches` raises, the pipeline drains
        before the error is passed on; if other ranks have begun more steps, the run fails on all of them, as after any
        error.

        Raises:
            ValueError: a parameter was changed, or got a hook, outside the engine; two ranks that hold a stage have
                other parameters for it; a batch that cannot be cut.
        """
        if self._undrained is not None:
            raise RuntimeError(f"the engine cannot run: {self._undrained}")
        self._holdings.check_seals()
        with self.team.running_alone():
            yield from self._run(batches)

    def _run(self, batches: Iterable[tuple[Tensor, Tensor] | MiniBatch]) -> Iterator[StepResult]:
        feed = Feed(map(self._as_mini_batch, batches), self.step, Ending(self.team, self._runs))
        self._runs += 1
        self._stages.train()
        self._undrained = "it is in the middle of another run; exhaust or close that iterator first"
        results = self._results(feed)
        for result in results:
            try:
                yield result
            except BaseException:  # a `break` closes the iterator, and a caller may throw anything into it
                if not sys.is_finalizing():  # else Python is exiting: the results of a drain would be lost
                    feed.close()
                    for _ in results:
                        pass
                raise
        feed.raise_error()

    def _connect(self, feed: Feed) -> None:
        """Derive the layouts of messages from the first batch; then drop parameters that this rank does not hold."""
        if self._executor.mailbox is None:
            self._holdings.tell_others(self._settings, self._runs)
            if (first := feed.first()) is None:
                return
            # an earlier run without a step may have closed them, and fake copies also read gradients
            self._holdings.open_seals()
            layouts = layouts_of(self._network, one_tensor(first.inputs(0)), first.targets(0))
            shards = self._holdings.shards
            with self.team.positions.noting("connecting"):
                self._holdings.check_alike(self._runs)
                self._executor.mailbox = Mailbox(layouts, shards, self._executor.program, self.team.device)
        self._holdings.drop_others()

    def _results(self, feed: Feed) -> Iterator[StepResult]:
        """Run the program as long as there are batches, then its drain; yield the training steps that finish here."""
        try:
            if self.team.size > 1:
                self._connect(feed)
            self._holdings.close_seals()
            for result in self._executor.run(feed):
                self.step = result.step + 1
                yield result
        except (Exception, KeyboardInterrupt) as error:
            has_sent = self._executor.mailbox is not None
            where = " in new processes" if has_sent else ""
            self._undrained = f"it failed in step {self.step}: {error!r}; load a checkpoint into a new engine{where}"
            self.team.give_up(error, has_sent)
            raise
        self.step = feed.first_step + feed.begun
        self._undrained = None

    def _as_mini_batch(self, batch: tuple[Tensor, Tensor] | MiniBatch) -> MiniBatch:
        sizes = self.schedule.sizes
        if isinstance(batch, (tuple, list)) or not isinstance(batch, MiniBatch):
            batch = TensorMiniBatch(*tensors_of(batch), sizes.sample_parts, self.team.device)
        return batch if sizes.slices == 1 else SlicedMiniBatch(batch, sizes)

    def model(self) -> nn.Sequential:
        """Return the model with theta[step] and the mean of all sets of buffers; all ranks must call it together.

        The model shares its parameters with the engine: read, evaluate or copy it, but do not train it.
        """
        self._require_drained()
        self._holdings.fill_in(self.step)
        return self._stages

    def outputs(self, batches: TestBatches, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (output, targets) of each batch of an evaluation that ends on this rank; the ranks together yield all.

        All ranks must call it together and exhaust the iterator. If the stages are a chain, each is computed by a rank
        that holds it and no rank holds all, then batches pass from rank to rank and no parameters are sent. Otherwise,
        as with branches, every rank gathers the stages that it lacks, and each of n ranks computes every n-th batch
        with the whole model.

        Args:
            batches: returns the batches with the given numbers, each below `count`, in that order: (inputs [B, ...],
                targets [B, ...]). A rank only requests the batches that it reads.
            count: number of batches.
        """
        self._require_drained()
        if not is_pipelined(self.schedule):
            return outputs_of(self.model(), batches(range(self.rank, count, self.team.size)), self._network.autocast)
        self._holdings.average_buffers(self.step)
        self._stages.eval()
        return pipelined_outputs(self.schedule, self._network, self.team, batches, count)

    def trace(self) -> Trace:
        """Return the trace of the traced steps: actions, versions, live activation bytes, messages.

        All ranks must call it together; rank 0 gets the trace of all ranks, the others their own.

        Raises:
            ValueError: the engine was made to trace nothing.
        """
        if self._tracer.steps == 0:
            raise ValueError("nothing is traced with traced_steps=0: make the engine with traced_steps=None or 3")
        recorded = self._tracer.recorded()
        parts = [from_plain(each) for each in self.team.gather(as_plain(recorded))] or [recorded]
        sizes, lanes, tracer = self.schedule.sizes, self.schedule.timeline.lanes, self._tracer
        return Trace.merged(sizes, lanes, parts, tracer.begins, is_cut=not tracer.active, fill=self._fill)

    @property
    def ledger_reads(self) -> int:
        """Number of reads of parameters that the ledger has compared with the update rule."""
        return self._executor.ledger.reads

    @property
    def max_lead(self) -> int:
        """The most training steps by which one rank can be ahead of another."""
        return self.schedule.max_lead

    @property
    def is_tracing(self) -> bool:
        """Whether the next step will be traced."""
        return self._tracer.active and self.step < self.traced_until

    @property
    def traced_until(self) -> int:
        """The first step that is not traced."""
        return self._tracer.end_step

    def trace_again(self) -> None:
        """Forget the trace, and trace as many steps from the next one on: after a state of another placement."""
        self._require_drained()
        self._tracer.begin(self.step)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameter versions alive on this rank."""
        held = (value.stage for value in self._holdings.values if value.kind == Kind.PARAMETERS)
        return sum(self._holdings.states[stage].version_bytes for stage in held)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizers' states on this rank, without `delay_bytes`."""
        return sum(state.optimizer_bytes for state in self._holdings.states.values())

    @property
    def delay_bytes(self) -> int:
        """Bytes of the last steps that methods against delay keep on this rank."""
        return sum(state.delay_bytes for state in self._holdings.states.values())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on: versions, optimizers, buffers, the step number.

        Its form is the same for every placement: by stage, version and set of buffers. All ranks must call it together;
        rank 0 gets the state, the others an empty one. Its tensors may be the engine's own: save or copy them before
        continuing.
        """
        self._require_drained()
        stages = self._holdings.state_dict(self.step)
        return {"step": self.step, "stages": stages} if self.rank == 0 else {}

    def differing_copies(self) -> list[str]:
        """Return, on rank 0, what ranks that hold the same stage have differently of it: nothing, unless they err.

        All ranks must call it together. In `state_dict`, each version and optimizer is that of one rank.
        """
        self._require_drained()
        return self._holdings.differing_copies()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, bitwise, from a result of `state_dict`, on any placement; nothing is traced from there on.

        Settings of the optimizer, such as momentum, are then those of the state; learning rates stay as they are here.

        Raises:
            ValueError: `state` is of another model, mode or optimizer; the engine is left unchanged.
        """
        self._require_drained()
        if missing := {"step", "stages"} - (state.keys() if isinstance(state, Mapping) else set()):
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing))}: give what state_dict() returned; where there are "
                "several ranks, what it returned on rank 0, on every rank"
            )
        with torch.inference_mode(False):  # else its tensors could not be trained
            self._holdings.load_state_dict(state["step"], state["stages"])
        self.step = state["step"]
        self._tracer.stop()

    def _require_drained(self) -> None:
        if self._undrained is not None:
            raise RuntimeError(f"the pipeline is not drained: {self._undrained}")
