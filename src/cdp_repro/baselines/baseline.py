"""The base class of the baselines: the engine's interface, the loop over training steps, and the canonical state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cdp_repro.baselines.worker_stage import StageOptimizer, WorkerStage, fill, local, on_cpu, skeleton, write
from cdp_repro.engine.arguments import refuse_shared_parameters
from cdp_repro.engine.batches import MiniBatch, TensorMiniBatch
from cdp_repro.engine.compute import LossFn
from cdp_repro.engine.executor import StepResult
from cdp_repro.engine.outputs import TestBatches, outputs_of
from cdp_repro.engine.parameters import OptimizerFactory, average, check_buffers, check_same_tensors
from cdp_repro.launch.team import Team
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.trace import Trace

Tensors = dict[str, Tensor]


class Baseline(ABC):
    """Trains a model cut into stages, by data parallelism on N ranks, with one of torch's libraries.

    It replaces an `Engine` of mode "dp", with one process per worker. Every process makes a baseline and calls the
    same methods in the same order. Losses, parameters and buffers equal the engine's, except for the order in which
    gradients are added. `name` is its name in `baseline=`.

    Args:
        stages: modules in forward order, the same on every rank; each takes and returns one tensor,
            [micro-batch, ...]. They belong to the baseline from here on: it may move, shard and update them in place.
        loss_fn: (output of the last stage, targets) -> scalar mean over the micro-batch.
        optimizer: makes the optimizer of a stage from the list of its trainable parameters.
        workers: N, the number of micro-batches per mini-batch and of ranks in the default process group.
        device: where this rank computes; its process group must be able to send tensors from there.
        seed: seeds the random draws of the stages in training (dropout), together with step, worker and stage.
        learning_rate_factor: step -> factor on the optimizer's learning rate in the update that makes
            theta[step + 1].
        autocast: makes the context in which forwards run.

    Raises:
        ValueError: there is no process group, its size is not `workers`, two stages share parameters, or the library
            cannot place the stages.
    """

    name: ClassVar[str]
    traced_until: ClassVar[int] = 0
    """A library's steps are not recorded."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        *,
        workers: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        learning_rate_factor: Callable[[int], float] = lambda _: 1.0,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not stages:
            raise ValueError("stages=[]: at least 1 stage is needed")
        refuse_shared_parameters(stages)
        self.team = Team(workers, torch.device(device), f"{self.name} with workers={workers}")
        self.workers = workers
        self.rank = self.team.rank
        self.step = 0
        self.learning_rate_factor = learning_rate_factor
        self._device = torch.device(device)
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._skeleton = skeleton(stages)
        self._stages = [WorkerStage(stage, j, seed, self._device, autocast) for j, stage in enumerate(stages)]
        self._place()
        self._optimizers = {stage.number: StageOptimizer(stage.stage, optimizer) for stage in self._stages}

    @abstractmethod
    def _place(self) -> None:
        """Put the stages of this rank on its device and hand them to the library; drop others from `_stages`."""

    @abstractmethod
    def _gradients(self, batch: MiniBatch) -> Tensor:
        """Leave the mean gradient over workers in the parameters of this rank.

        Returns: [N], each worker's loss: all of them on rank 0; on other ranks NaN where unknown.
        """

    @abstractmethod
    def reads_inputs(self, worker: int) -> bool:
        """Whether this rank asks a mini-batch for the inputs of `worker`."""

    @abstractmethod
    def _buffers(self) -> dict[tuple[int, int], Tensors]:
        """Return the buffers that live on this rank, by (stage, worker) and name."""

    def run(self, batches: Iterable[tuple[Tensor, Tensor] | MiniBatch]) -> Generator[StepResult, None, None]:
        """Train on `batches`, one per training step, and yield each step after its update.

        Every rank gets the same batches, ([B, ...], [B]) or MiniBatch objects, and takes the micro-batches that it
        needs. Rank 0 yields the losses of all workers, the others those they know, and NaN. Nothing is in flight
        between two steps, so a closed iterator stops there. After an error, load a checkpoint into a new baseline.
        """
        for batch in batches:
            self.team.positions.enter(f"training step {self.step}")
            for stage in self._stages:
                stage.train()
                stage.step = self.step
            losses = self._gradients(self._as_mini_batch(batch))
            for optimizer in self._optimizers.values():
                optimizer.update(self.learning_rate_factor(self.step))
            self.step += 1
            yield StepResult(self.step - 1, losses)

    def _as_mini_batch(self, batch: tuple[Tensor, Tensor] | MiniBatch) -> MiniBatch:
        if isinstance(batch, (tuple, list)):
            return TensorMiniBatch(*batch, self.workers, self._device)
        return batch

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            return self._loss_fn(output, targets)

    def model(self) -> nn.Sequential:
        """A copy of the whole model with theta[step] and buffers averaged over workers, on every rank. Collective."""
        parts = self.team.share(self.team.gather(self._part(with_optimizers=False)))
        stages = _merge(self.step, parts, len(self._skeleton))["stages"]
        values = [{**stage["versions"][self.step], **average(stage["buffers"])} for stage in stages]
        return fill(self._skeleton, values, self._device)

    def outputs(self, batches: TestBatches, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (output, targets) of every N-th evaluation batch, from a copy of the whole model.

        Shapes and arguments are those of `Engine.outputs`.
        """
        return outputs_of(self.model(), batches(range(self.rank, count, self.workers)), self._autocast)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that this rank holds between two training steps."""
        return sum(local(parameter).nbytes for stage in self._stages for parameter in stage.parameters())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizers' states on this rank."""
        return sum(optimizer.bytes for optimizer in self._optimizers.values())

    @property
    def delay_bytes(self) -> int:
        """0: nothing is read late."""
        return 0

    @property
    def max_lead(self) -> int:
        """The most training steps by which one rank can be ahead of another."""
        return 2

    @property
    def is_tracing(self) -> bool:
        """False: there is nothing to trace."""
        return False

    def trace_again(self) -> None:  # noqa: B027 - no library has anything to do here
        """Do nothing: there is nothing to trace."""

    @property
    def ledger_reads(self) -> int:
        """0: the library reads parameters unseen, so there is no ledger."""
        return 0

    def trace(self) -> Trace:
        """Empty: the library does not report its actions."""
        return Trace(Sizes(len(self._skeleton), self.workers), Lanes(self.workers), ())

    def state_dict(self) -> dict[str, Any]:
        """Return, on rank 0, a copy of everything that the next step depends on; {} on other ranks. Collective.

        It is on the CPU and has the form of an `Engine` of mode "dp", which can go on from it: {"step": T,
        "stages": [{"versions": {T: parameters}, "optimizer": {...}, "buffers": [one dict per worker]}]}.
        """
        parts = self.team.gather(self._part(with_optimizers=True))
        return _merge(self.step, parts, len(self._skeleton)) if self.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` of a baseline or an `Engine` returned on rank 0; every rank gets it.

        Raises:
            ValueError: it is of another model, mode, optimizer or number of workers; the baseline is unchanged.
        """
        self._check_state(state)
        for stage in self._stages:
            loaded = state["stages"][stage.number]
            for name, parameter in stage.stage.named_parameters():
                write(parameter, loaded["versions"][state["step"]][name])
            self._optimizers[stage.number].load_state_dict(loaded["optimizer"])
        for (number, worker), buffers in self._buffers().items():
            for name, buffer in buffers.items():
                write(buffer, state["stages"][number]["buffers"][worker][name])
        self.step = state["step"]

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state does not fit, on every rank alike as long as their optimizers are the same."""
        if len(state["stages"]) != len(self._skeleton):
            raise ValueError(f"the checkpoint has {len(state['stages'])} stages, this run {len(self._skeleton)}")
        for number, (stage, loaded) in enumerate(zip(self._skeleton, state["stages"], strict=True)):
            if set(loaded["versions"]) != {state["step"]}:
                raise ValueError(
                    f"the checkpoint has the versions {sorted(loaded['versions'])}, {self.name} needs only "
                    f"{state['step']}: it was written in another mode than dp"
                )
            check_same_tensors(dict(stage.named_parameters()), loaded["versions"][state["step"]])
            check_buffers(dict(stage.named_buffers()), loaded["buffers"], self.workers)
            mine, theirs = self._optimizers.get(number), loaded["optimizer"]["class"]
            if mine is not None and mine.class_name != theirs:
                raise ValueError(f"the checkpoint is of the optimizer {theirs}, this run has {mine.class_name}")

    def _part(self, with_optimizers: bool) -> dict[str, dict[Any, Any]]:
        """Return this rank's part of the state, on the CPU. Collective.

        Rank j mod N sends parameters and optimizer of stage j, so that only one model is sent in all. Every rank sends
        the buffers that it has.
        """
        part: dict[str, dict[Any, Any]] = {"parameters": {}, "optimizers": {}}
        for stage in self._stages:  # every rank takes part in gathering every shard, whichever rank sends it
            parameters = {name: on_cpu(parameter) for name, parameter in stage.stage.named_parameters()}
            optimizer = self._optimizers[stage.number].state_dict() if with_optimizers else None
            if stage.number % self.workers == self.rank:
                part["parameters"][stage.number] = parameters
                part["optimizers"][stage.number] = optimizer
        part["buffers"] = {
            key: {name: on_cpu(buffer) for name, buffer in buffers.items()} for key, buffers in self._buffers().items()
        }
        return part


def _merge(step: int, parts: Sequence[dict[str, dict[Any, Any]]], stages: int) -> dict[str, Any]:
    """Return the canonical state that the parts of all ranks make up."""
    parameters, optimizers, buffers = (
        ChainMap(*(part[key] for part in parts)) for key in ("parameters", "optimizers", "buffers")
    )
    return {
        "step": step,
        "stages": [
            {
                "versions": {step: parameters[j]},
                "optimizer": optimizers[j],
                "buffers": [buffers[j, i] for i in range(len(parts))],
            }
            for j in range(stages)
        ],
    }
