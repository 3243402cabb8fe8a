"""The engine: what others build on. It ties schedule, state and executor together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cdp_repro.engine.batches import Feed, MiniBatch, TensorMiniBatch
from cdp_repro.engine.compute import LossFn, StageCompute
from cdp_repro.engine.executor import Executor, Settings, StepResult
from cdp_repro.engine.ledger import Ledger
from cdp_repro.engine.parameters import OptimizerFactory, StageState
from cdp_repro.engine.tracing import Tracer
from cdp_repro.schedule import Schedule, Slot, Trace


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
        optimizer: makes the optimizer of a stage from the list of its trainable parameters.
        mode: "dp", "cdp_v1", "cdp_v2", or a staleness matrix with a row a worker and a column a stage.
        placement: where the stages run; "single_device".
        workers: N, micro-batches per mini-batch; the number of stages must be a multiple; default: that number.
        slot_order: "paper" or "backward_first": the order of the actions of a slot that share a device.
        device: where the stages are moved.
        seed: of what the stages draw in training (dropout), with step, worker and stage.
        learning_rate_factor: step -> factor on the optimizer's learning rate in the update that makes
            theta[step + 1] (a schedule).
        autocast: makes the context in which forwards run, e.g. `lambda: torch.autocast("cpu", torch.bfloat16)`.
        traced_steps: training steps, from the first on, whose actions and live activation bytes are recorded.

    Raises:
        ValueError: sizes that do not fit, parameters shared by two stages.
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
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        traced_steps: int = 0,
    ) -> None:
        if not stages:
            raise ValueError("stages=[]: at least 1 stage is needed")
        _refuse_shared_parameters(stages)
        self.schedule = Schedule.build(
            mode, len(stages) if workers is None else workers, len(stages), placement, slot_order
        )
        self._device = torch.device(device)
        self.learning_rate_factor = learning_rate_factor
        self._settings = Settings(self._device, seed, learning_rate_factor)
        self._stages = nn.Sequential(*stages).to(self._device)
        self._states = [StageState(stage, optimizer, self.schedule.workers) for stage in self._stages]
        self._compute = [
            StageCompute(stage, loss_fn if number == len(stages) - 1 else None, autocast)
            for number, stage in enumerate(self._stages)
        ]
        self._ledger = Ledger(self.schedule.mode)
        self._next_slot = 0
        self._undrained: str | None = None
        self.step = 0
        self._tracer = Tracer(self.schedule, 0, self._device, traced_steps)

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
        executor = Executor(
            self.schedule, self._states, self._compute, feed, self._settings, self._ledger, self._tracer
        )
        slots = self.schedule.program(0, feed.steps(), self._next_slot)
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

    def _results(self, executor: Executor, slots: Iterator[Slot]) -> Iterator[StepResult]:
        for slot in slots:
            self._next_slot = slot.number + 1
            for result in executor.execute(slot):
                self.step = result.step + 1
                yield result

    def _as_mini_batch(self, batch: tuple[Tensor, Tensor] | MiniBatch) -> MiniBatch:
        if isinstance(batch, (tuple, list)):
            inputs, targets = batch
            return TensorMiniBatch(inputs, targets, self.schedule.workers, self._device)
        return batch

    @property
    def model(self) -> nn.Sequential:
        """The model with theta[step] and buffers averaged over workers.

        It shares its parameters with the engine: read, evaluate or copy it, do not train it.
        """
        self._require_drained()
        for state in self._states:
            state.average_buffers()
        return self._stages

    @property
    def trace(self) -> Trace:
        """What ran in the traced steps: actions, versions, live activation bytes."""
        return self._tracer.trace()

    @property
    def ledger_reads(self) -> int:
        """Number of reads of parameters that the ledger has compared with the update rule."""
        return self._ledger.reads

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameter versions that are alive."""
        return sum(len(state.versions) * state.version_bytes for state in self._states)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on: versions, optimizers, buffers, the step number.

        Its tensors are the engine's own: save or copy them before going on.
        """
        self._require_drained()
        return {"step": self.step, "stages": [state.state_dict() for state in self._states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, bitwise, from what `state_dict` returned; nothing is traced from there on.

        Raises:
            ValueError: it is of another model, mode or optimizer; the engine is as it was.
        """
        self._require_drained()
        if len(state["stages"]) != len(self._states):
            raise ValueError(f"the checkpoint has {len(state['stages'])} stages, this engine {len(self._states)}")
        for number, (mine, theirs) in enumerate(zip(self._states, state["stages"], strict=True)):
            oldest = max(0, state["step"] - self.schedule.mode.oldest(number))
            mine.check_state(theirs, set(range(oldest, state["step"] + 1)))
        for mine, theirs in zip(self._states, state["stages"], strict=True):
            mine.load_state_dict(theirs)
        self.step = state["step"]
        self._tracer.stop()

    def _require_drained(self) -> None:
        if self._undrained is not None:
            raise RuntimeError(f"the pipeline is not drained: {self._undrained}")


def _refuse_shared_parameters(stages: Sequence[nn.Module]) -> None:
    owner: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if owner.setdefault(parameter, number) != number:
                raise ValueError(
                    f"stages {owner[parameter]} and {number} share the parameter {name}: "
                    "each stage has versions of its own, so put both uses into one stage"
                )
