"""The engine: what others build on. It ties schedule, state and executor together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cdp_repro.engine.batches import Feed, MiniBatch, TensorMiniBatch
from cdp_repro.engine.compute import LossFn, StageCompute
from cdp_repro.engine.executor import Executor, Settings, StepResult
from cdp_repro.engine.layouts import Layout, stage_layouts
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.losses import Losses
from cdp_repro.engine.mailbox import Mailbox
from cdp_repro.engine.parameters import OptimizerFactory, StageState, WorkerBuffers
from cdp_repro.engine.positions import Positions
from cdp_repro.engine.shards import Shards
from cdp_repro.engine.team import Team
from cdp_repro.engine.tracing import Tracer
from cdp_repro.schedule import Payload, Schedule, Slot, Trace


class Engine:
    """Trains a model cut into stages, on the timeline and by the update rule of `mode`.

        engine = Engine(stages=[...], loss_fn=F.cross_entropy, mode="cdp_v2",
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        for result in engine.run(batches):
            print(result.step, result.losses)
        engine.model.eval()

    Args:
        stages: modules in forward order; each takes and returns one tensor, [micro-batch, ...]. A stage must not
            change its input in place. Their parameters become the initial version of the engine.
        loss_fn: (output of the last stage, targets) -> scalar mean over the micro-batch.
        optimizer: makes the optimizer of a stage from the list of its trainable parameters. With shards (see
            `collectives`) it updates a rank's pieces of them, [values, 1, ..., 1], in the same groups: it must treat
            each value by itself, as SGD and Adam do.
        mode: "dp", "cdp_v1", "cdp_v2", "accumulation", or a staleness matrix with a row a worker and a column a stage.
        placement: where the stages run and who holds their parameters: "single_device", "replicated", "zero",
            "model_parallel" or "pipeline". All but the first need as many processes in the torch.distributed group
            as the schedule has ranks, each of which builds the same engine and takes part in every call.
        workers: N, micro-batches per mini-batch; the number of stages must be a multiple; default: that number.
        replicas: R, ranks that share each worker's micro-batch.
        pipeline_schedule: how mode "dp" runs on the placement "pipeline": "one_f_one_b" or "gpipe".
        collectives: mode "dp" on the placements "replicated" and "zero" by the library's collectives (all-reduce;
            on "zero" all-gathers and reduce-scatters of shards, of which each rank then has one of every stage), whose
            sums are in an order of their own, in place of our ordered messages.
        slot_order: "paper" or "backward_first": the order of the actions of a slot that share a device.
        device: where the stages are moved.
        seed: of what the stages draw in training (dropout), with step, worker and stage.
        learning_rate_factor: step -> factor on the optimizer's learning rate in the update that makes
            theta[step + 1] (a schedule).
        autocast: makes the context in which forwards run, e.g. `lambda: torch.autocast("cpu", torch.bfloat16)`.
        traced_steps: training steps, from the first on, whose actions and live activation bytes are recorded.

    Raises:
        ValueError: sizes that do not fit, parameters shared by two stages, another number of processes than ranks.
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
        replicas: int = 1,
        pipeline_schedule: str = "one_f_one_b",
        collectives: bool = False,
        slot_order: str = "paper",
        device: torch.device | str = "cpu",
        seed: int = 0,
        learning_rate_factor: Callable[[int], float] = lambda _: 1.0,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        traced_steps: int = 0,
    ) -> None:
        if not stages:
            raise ValueError("stages=[]: at least 1 stage is needed")
        refuse_shared_parameters(stages)
        self.schedule = Schedule.build(
            mode,
            len(stages) if workers is None else workers,
            len(stages),
            placement,
            slot_order,
            replicas=replicas,
            pipeline_schedule=pipeline_schedule,
            collectives=collectives,
        )
        self._device = torch.device(device)
        self.team = Team(self.schedule.ranks, self._device, str(self.schedule))
        self.learning_rate_factor = learning_rate_factor
        self._loss_fn, self._autocast = loss_fn, autocast
        self._settings = Settings(self._device, seed, learning_rate_factor)
        self._stages = nn.Sequential(*stages).to(self._device)
        self._parameter_layouts = [Layout.of(dict(stage.named_parameters())) for stage in self._stages]
        self._shards = self._cut_stages() if self.schedule.placement.is_sharded else []
        self._states = {
            number: self._state_of(number, optimizer)
            for number in range(len(stages))
            if self.team.rank in self.schedule.placement.holders(number)
        }
        self._buffers = [WorkerBuffers(stage, self.schedule.micro_batches) for stage in self._stages]
        self._compute = [
            StageCompute(stage, loss_fn if number == len(stages) - 1 else None, autocast)
            for number, stage in enumerate(self._stages)
        ]
        self._mailbox: Mailbox | None = None
        self._losses = Losses(self.schedule, self.team.rank, self.team.control)
        self._ledger = Ledger(self.schedule.mode)
        self._next_slot = 0
        self._undrained: str | None = None
        self.step = 0
        self._positions = Positions(self.team)
        self._tracer = Tracer(self.schedule, self.team, self._device, traced_steps)

    def _cut_stages(self) -> list[Shards]:
        size = self.team.rank, self.team.size, self._device
        return [Shards(dict(stage.named_parameters()), *size) for stage in self._stages]

    def _state_of(self, number: int, optimizer: OptimizerFactory) -> StageState:
        """Return what this rank holds of a stage: all, or its pieces of the parameters."""
        parameters = dict(self._stages[number].named_parameters())
        if not self._shards:
            return StageState(parameters, optimizer)
        shards, trainable = self._shards[number], [p for p in parameters.values() if p.requires_grad]
        pieces = {
            name: nn.Parameter(piece, parameters[name].requires_grad)
            for name, piece in shards.pieces(parameters).items()
        }
        return StageState(pieces, shards.optimizer(optimizer, trainable))

    def _holds(self, number: int) -> bool:
        """Whether this rank holds all of a stage."""
        return number in self._states and not self._shards

    @property
    def rank(self) -> int:
        """The rank of this process; 0 on a single device."""
        return self.team.rank

    def run(self, batches: Iterable[tuple[Tensor, Tensor] | MiniBatch]) -> Generator[StepResult, None, None]:
        """Train on `batches`, one a training step, and yield each step when its updates are done.

        Batches are taken when their first forward is due: up to two steps are in flight. At the end of the
        batches, or when the iterator is closed early (a `break`), the pipeline drains: steps that have begun are
        finished; after a `break` nobody sees their losses. A later call goes on where this one ended; where calls
        are cut changes no number. If `batches` raises, the pipeline drains before the error is passed on.
        """
        if self._undrained is not None:
            raise RuntimeError(f"the engine cannot run: {self._undrained}")
        feed = Feed(map(self._as_mini_batch, batches), self.step)
        executor = self._executor(feed)
        slots = self.schedule.slots(feed.steps(), self._next_slot)
        self._stages.train()
        self._undrained = "it is in the middle of another run; exhaust or close that iterator first"
        try:
            try:
                yield from self._results(executor, slots)
            except GeneratorExit:
                feed.close()
                for _ in self._results(executor, slots):
                    pass
                self._undrained = None
                raise
        except Exception as error:
            self._undrained = f"it failed in step {self.step}: {error!r}; load a checkpoint into a new engine"
            raise
        self._undrained = None
        feed.raise_error()

    def _executor(self, feed: Feed) -> Executor:
        if self.team.size > 1:
            self._connect(feed)
        return Executor(
            self.schedule, self.team.rank, self._states, self._buffers, self._compute, feed, self._losses,
            self._settings, self._ledger, self._tracer, self._positions, self._mailbox,
        )  # fmt: skip

    def _connect(self, feed: Feed) -> None:
        """Learn from the first batch what messages look like; then drop the parameters that other ranks hold."""
        if self._mailbox is None and (first := feed.first()) is not None:
            layouts = stage_layouts([*self._stages], self._loss_fn, first.inputs(0), first.targets(0), self._autocast)
            self._mailbox = Mailbox(layouts, self._shards, self.schedule.micro_batches, self._device)
            self.schedule = self.schedule.sized([layout.by_payload[Payload.GRADIENTS].nbytes for layout in layouts])
        for number, stage in enumerate(self._stages):
            if not self._holds(number):
                for parameter in stage.parameters():
                    parameter.data = parameter.data.new_empty(0)

    def _results(self, executor: Executor, slots: Iterator[Slot]) -> Iterator[StepResult]:
        for slot in slots:
            self._next_slot = slot.number + 1
            self._tracer.enter(slot)
            for result in executor.execute(Slot(slot.number, slot.program_of(self.team.rank))):
                self.step = result.step + 1
                yield result
        executor.drain()

    def _as_mini_batch(self, batch: tuple[Tensor, Tensor] | MiniBatch) -> MiniBatch:
        if isinstance(batch, (tuple, list)):
            inputs, targets = batch
            return TensorMiniBatch(inputs, targets, self.schedule.micro_batches, self._device)
        return batch

    @property
    def model(self) -> nn.Sequential:
        """The model with theta[step] and buffers averaged over workers; all ranks must ask for it together.

        It shares its parameters with the engine: read, evaluate or copy it, do not train it.
        """
        self._require_drained()
        self._share_buffers()
        for number, stage in enumerate(self._stages):
            whole = self._whole_parameters(number)
            for name, parameter in stage.named_parameters() if not self._holds(number) else ():
                parameter.data = whole[name]
            average = self._buffers[number].average() if list(stage.buffers()) else {}
            for name, buffer in stage.named_buffers():
                buffer.copy_(average[name])
        return self._stages

    def _whole_parameters(self, number: int) -> Mapping[str, Tensor]:
        """Return the current parameters of a stage, from the ranks that hold them; all must ask for it together."""
        if self._shards:
            transfer, views = self._shards[number].gather(self._states[number].read(self.step).tensors)
            return {name: view.clone() for name, view in views(transfer.wait()).items()}
        own = dict(self._stages[number].named_parameters()) if self._holds(number) else None
        keeper = self.schedule.placement.keeper(number, self.step)
        return self.team.broadcast(self._parameter_layouts[number], own, keeper)

    def _share_buffers(self) -> None:
        """Tell every rank the buffers of all workers, each from the rank that computes for the worker next."""
        first = self.step * self.schedule.micro_batches
        for stage, buffers in enumerate(self._buffers):
            for worker, own in enumerate(buffers.of):
                source = self.schedule.placement.rank_of(first + worker, stage)
                own.update(self.team.broadcast(Layout.of(own), own, source))

    @property
    def trace(self) -> Trace:
        """What ran in the traced steps: actions, versions, live activation bytes, messages.

        All ranks must ask for it together; rank 0 gets that of all ranks, others their own.
        """
        parts = self.team.gather(self._tracer.recorded())
        return Trace.merged(self.schedule.micro_batches, self.schedule.stages, parts or [self._tracer.recorded()])

    @property
    def ledger_reads(self) -> int:
        """Number of reads of parameters that the ledger has compared with the update rule."""
        return self._ledger.reads

    @property
    def max_lead(self) -> int:
        """Training steps by which one rank can at most be ahead of another."""
        return max(map(max, self.schedule.mode.staleness)) + 4

    @property
    def is_tracing(self) -> bool:
        """Whether the next step will be traced."""
        return self._tracer.active

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameter versions that are alive on this rank."""
        return sum(len(state.versions) * state.version_bytes for state in self._states.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizers' states on this rank."""
        return sum(state.optimizer_bytes for state in self._states.values())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on: versions, optimizers, buffers, the step number.

        It is canonical, by stage, version and worker, whatever the placement. All ranks must ask for it together;
        rank 0 gets it, others an empty one. Its tensors may be the engine's own: save or copy them before going on.
        """
        self._require_drained()
        self._share_buffers()
        placement, rank = self.schedule.placement, self.team.rank
        parts = self.team.gather(
            {
                stage: state.state_dict()
                for stage, state in self._states.items()
                if self._shards or placement.keeper(stage, self.step) == rank
            }
        )
        if rank:
            return {}
        stages = dict(chain.from_iterable(part.items() for part in parts))
        for number, shards in enumerate(self._shards):
            stages[number] = shards.join_states([part[number] for part in parts], self._states[number].optimized)
        return {
            "step": self.step,
            "stages": [{**stages[number], "buffers": buffers.of} for number, buffers in enumerate(self._buffers)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, bitwise, from what `state_dict` returned, on any placement; nothing is traced from there on.

        Raises:
            ValueError: it is of another model, mode or optimizer; the engine is as it was.
        """
        self._require_drained()
        step, stages = state["step"], state["stages"]
        if len(stages) != self.schedule.stages:
            raise ValueError(f"the checkpoint has {len(stages)} stages, this engine {self.schedule.stages}")
        held = {
            number: self._shards[number].cut_state(stages[number], mine.optimized) if self._shards else stages[number]
            for number, mine in self._states.items()
        }
        for number, mine in self._states.items():
            oldest = max(0, step - self.schedule.mode.oldest(number))
            mine.check_state(held[number], set(range(oldest, step + 1)))
        for buffers, theirs in zip(self._buffers, stages, strict=True):
            buffers.check_state(theirs["buffers"])
        for number, mine in self._states.items():
            kept = self.schedule.placement.versions_kept(self.team.rank, number, step)
            mine.load_state_dict(held[number], kept)
        for buffers, theirs in zip(self._buffers, stages, strict=True):
            buffers.load_state(theirs["buffers"])
        self.step = step
        self._tracer.stop()

    def _require_drained(self) -> None:
        if self._undrained is not None:
            raise RuntimeError(f"the pipeline is not drained: {self._undrained}")


def refuse_shared_parameters(stages: Sequence[nn.Module]) -> None:
    """Raise ValueError if two stages share a parameter."""
    owner: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if owner.setdefault(parameter, number) != number:
                raise ValueError(
                    f"stages {owner[parameter]} and {number} share the parameter {name}: "
                    "each stage has versions of its own, so put both uses into one stage"
                )
