"""The training loop: segments of training steps, with an evaluation or a checkpoint between two of them."""

from __future__ import annotations

import logging
import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cdp_repro.config import RunConfig
from cdp_repro.config.numerics import parameter_dtype
from cdp_repro.config.schema import is_evaluated
from cdp_repro.data import Dataset, DatasetError, MiniBatch, steps_per_epoch
from cdp_repro.engine.engine import Engine
from cdp_repro.engine.executor import StepResult
from cdp_repro.launch.signals import StopRequest
from cdp_repro.observe.metrics import MetricsLog
from cdp_repro.observe.progress import Progress
from cdp_repro.schedule import Schedule
from cdp_repro.trace import Trace
from cdp_repro.training.agreement import StopAgreement
from cdp_repro.training.assembly import reading_rule
from cdp_repro.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from cdp_repro.training.divergence import DivergedError, Divergence, advice_for, stage_that_is_not_finite
from cdp_repro.training.evaluate import Score, score_of
from cdp_repro.training.lookahead import Lookahead
from cdp_repro.training.resuming import is_moved, refuse_foreign

if TYPE_CHECKING:
    from cdp_repro.baselines.baseline import Baseline

logger = logging.getLogger("cdp_repro")


class Interrupted(RuntimeError):  # noqa: N818 - not an error of the program
    """A signal asked the run to stop; its state is in a checkpoint."""

    def __init__(self, signal: int, step: int, run_dir: Path) -> None:
        super().__init__(
            f"stopped by signal {signal} after {step} training steps; a checkpoint holds them: "
            f"go on with cdp-train {shlex.quote(f'resume={run_dir}')}"
        )
        self.signal = signal


_IDLE_SHARE = "time/idle_share_of_slots"
"""Key of the summary."""
_EPOCH_LOSS = "train/epoch_loss"
"""Key of the metrics, in the rows that are logged at the ends of epochs."""


@dataclass
class Position:
    """The trainer's own state between two steps, besides the engine's; a part of every checkpoint."""

    loss_sum: float = 0.0
    """Sum of the mean losses of the steps of the current epoch."""
    loss_steps: int = 0
    """Steps of the current epoch in `loss_sum`."""
    ledger_reads: int = 0
    """Reads of parameters that the ledger has compared with the rule, in all processes of the run."""
    epoch_loss: float = math.nan
    """Mean of the training loss over the newest whole epoch."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""
    traced: dict[str, float] = field(default_factory=dict)
    """Totals of the trace, by their key in the summary."""
    traced_until: int = 0
    """The first step that the trace does not need: a state before it has totals of a part of the trace."""


class Trainer:
    """Trains an engine on a data set, by a configuration."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        engine: Engine | Baseline,
        schedule: Schedule,
        metrics: MetricsLog | None,
        checkpoints: CheckpointStore,
        diverged: CheckpointStore,
        facts: Mapping[str, Any],
        on_trace: Callable[[Trace | None], None],
    ) -> None:
        """Prepare to train; every rank calls this.

        Args:
            config: The run's configuration.
            dataset: Its samples.
            engine: Trains; it has taken no step yet.
            schedule: That of the engine, or of the mode whose sizes a baseline has.
            metrics: The log of rank 0; None on other ranks, which write nothing.
            checkpoints: The checkpoints to resume from.
            diverged: Receives the state of a run of which a loss or a parameter is no longer finite.
            facts: Stored in every checkpoint, and compared when a run resumes.
            on_trace: Called on rank 0 with the trace of the first steps, after a drain; with None when a run goes on
                for which an earlier trace does not count.
        """
        self._config = config
        self._dataset = dataset
        self._engine = engine
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._diverged = diverged
        self._facts = facts
        self._on_trace = on_trace
        self._is_main = engine.rank == 0
        self._slots_per_step = schedule.slots_per_step
        self._agreement = StopAgreement(engine.team, engine.max_lead)
        self._divergence: Divergence | None = None
        self._steps_per_epoch = steps_per_epoch(dataset.train_size, config.batch_size)
        self._total_steps = self._steps_per_epoch * config.epochs
        self._device = config.torch_device
        self._step_seconds: deque[float] = deque(maxlen=1000)
        self._has_more = True
        """Whether another step of the segment comes; if not, its pipeline drains."""
        self._earlier_reads = 0
        self._is_read = reading_rule(schedule, engine)
        self._team = engine.team
        self._parameter_bytes = self._optimizer_bytes = self._delay_bytes = 0
        self.position = Position()

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Go on from a checkpoint, or from the start if there is none yet; drop later metrics.

        Raises:
            CheckpointError: the checkpoint is of another configuration or other data, or not of a training run.
        """
        if checkpoint is None:
            self._truncate_metrics(0)
            return
        try:
            refuse_foreign(checkpoint.meta, self._facts)
            self.position = Position(**checkpoint.meta["position"])
            self._earlier_reads = self.position.ledger_reads
            if checkpoint.tensors["engine"]["step"] != checkpoint.step:
                raise ValueError(f"it holds step {checkpoint.tensors['engine']['step']}, named {checkpoint.step}")
            self._engine.load_state_dict(checkpoint.tensors["engine"])
            torch.set_rng_state(checkpoint.tensors["torch_random_state"])
            is_cut = checkpoint.step < min(self.position.traced_until, self._total_steps)
            traces_again = is_cut or is_moved(checkpoint.meta["config"], self._config)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # it has other content
            lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"the checkpoint of step {checkpoint.step} does not fit this run: {lacks}") from error
        if traces_again:
            self._trace_again()
        self._truncate_metrics(checkpoint.step)

    def _trace_again(self) -> None:
        """Replace a trace of another placement, or of less than it needs: its messages and memory are not the run's."""
        self.position.traced = {}
        self._engine.trace_again()
        if self._is_main:
            self._on_trace(None)

    def _truncate_metrics(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.truncate_after(step, _EPOCH_LOSS if self._is_epoch_over else None)

    @property
    def _is_epoch_over(self) -> bool:
        """Whether the last step of an epoch has been trained, but the end of the epoch has not been logged.

        The checkpoint is written in this state. So a failing evaluation, e.g. on a damaged image, costs no training,
        and is repeated when the run resumes.
        """
        return self.position.loss_steps > 0 and self._engine.step % self._steps_per_epoch == 0

    def fit(self, stop: StopRequest) -> None:
        """Train to the end.

        Raises:
            Interrupted: on SIGINT, SIGTERM or SIGHUP, after a checkpoint.
            DivergedError: a loss, a parameter or the last evaluation is not finite. With the first two, the state is
                saved away from the checkpoints to resume from.
            DatasetError: a damaged image, after a checkpoint.
        """
        self._measure_parameters()
        unit = self._config.task.unit
        with Progress(self._total_steps, self._engine.step, self._units_per_step, unit, self._is_main) as progress:
            if self._is_epoch_over:  # the run ended between this checkpoint and the end of its evaluation
                self._end_epoch(progress)
            while self._engine.step < self._total_steps:
                was_tracing = self._engine.is_tracing
                self._train_segment(stop, progress)
                self._measure_parameters()
                self._stop_diverged()
                self.position.ledger_reads = self._earlier_reads + sum(self._team.gather(self._engine.ledger_reads))
                if was_tracing:
                    self._keep_trace()
                self._save_if_finite()
                self._stop_damaged()
                signal = self._team.share(next(filter(None, self._team.gather(stop.signal)), None))
                if signal is not None and self._engine.step < self._total_steps:
                    raise Interrupted(signal, self._engine.step, self._checkpoints.directory.parent)
                if self._is_epoch_over:
                    self._end_epoch(progress)
        if not all(map(math.isfinite, self.position.evaluation.values())):
            raise DivergedError(
                f"the last evaluation is not finite: {self.position.evaluation}. {advice_for(self._config)}"
            )

    def _measure_parameters(self) -> None:
        """Note, on rank 0, the bytes of parameter versions, optimizers and last steps on the rank with most of each."""
        self._parameter_bytes = max(self._team.gather(self._engine.parameter_bytes), default=0)
        self._optimizer_bytes = max(self._team.gather(self._engine.optimizer_bytes), default=0)
        self._delay_bytes = max(self._team.gather(self._engine.delay_bytes), default=0)

    def _train_segment(self, stop: StopRequest, progress: Progress) -> None:
        """Train up to the next end of an epoch or checkpoint, or until a stop is requested."""
        step = self._engine.step
        interval = self._config.checkpoint_every_steps
        end_of_epoch = (step // self._steps_per_epoch + 1) * self._steps_per_epoch
        end = min(end_of_epoch, (step // interval + 1) * interval)
        end = self._look_ahead(step, end)
        results = self._engine.run(self._batches(step, end, stop))
        begin = time.perf_counter()
        for result in results:
            self.position.loss_steps += 1
            if not self._is_main or self._divergence is not None:
                continue  # other ranks do not know all losses; after a loss that is not finite none is of interest
            loss = statistics.fmean(result.losses)
            now = time.perf_counter()
            # neither traced, nor with a loader's start, nor in the drain, when work of a step is already done
            if result.step > max(step, self._engine.traced_until) and self._has_more:
                self._step_seconds.append(now - begin)
            begin = now
            if math.isfinite(loss):
                self._after_step(result, loss)
                progress.step(loss, self.position.traced.get(_IDLE_SHARE))
            else:
                self._divergence = Divergence(result.step, loss, result.losses)

    def _look_ahead(self, first: int, end: int) -> int:
        """Begin to load the segment; return its end, which is earlier if a rank already knows of a damaged image.

        Later on, a rank that comes to step t knows of damage up to step t + L - 1, and asks for a stop. By then rank 0
        is about to begin at most step t + lead + 1. It stops all ranks `lead` steps after that: in time for
        L = 2 lead + 2.
        """
        self._lookahead = Lookahead(
            self._mini_batches(first, end), 1 if self._team.size == 1 else 2 * self._engine.max_lead + 2
        )
        known = [whole for whole in self._team.gather(self._lookahead.whole) if whole is not None]
        return self._team.share(min([end, *(first + whole for whole in known)]))

    def _mini_batches(self, first: int, end: int) -> Iterator[MiniBatch]:
        return self._dataset.train_batches(
            range(first, end),
            batch_size=self._config.batch_size,
            parts=self._config.sample_parts,
            seed=self._config.seed,
            device=self._device,
            dtype=parameter_dtype(self._config),
            channels_last=self._config.channels_last,
            is_read=self._is_read,
        )

    def _batches(self, first: int, end: int, stop: StopRequest) -> Iterator[MiniBatch]:
        """Yield the mini-batches of the segment, up to the step before which all ranks agree to stop."""
        batches = iter(self._lookahead)
        self._has_more = True
        for step in range(first, end):
            wanted = stop.signal is not None or self._divergence is not None or self._lookahead.error is not None
            if self._agreement.ends_before(step, wanted):
                break
            yield next(batches)
        self._has_more = False

    def _after_step(self, result: StepResult, loss: float) -> None:
        self.position.loss_sum += loss
        if (result.step + 1) % self._config.log_every_steps == 0:
            rate = self._config.optim.lr * self._engine.learning_rate_factor(result.step)
            row = {"epoch": result.step // self._steps_per_epoch, "train/loss": loss, "train/learning_rate": rate}
            self._log(result.step + 1, row)

    def _log(self, step: int, row: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.log(step, row)

    def _end_epoch(self, progress: Progress) -> None:
        """Log the epoch's mean training loss and, where it is due, an evaluation."""
        epoch = self._engine.step // self._steps_per_epoch
        self._team.positions.enter(f"the end of epoch {epoch}")
        self.position.epoch_loss = self.position.loss_sum / self.position.loss_steps
        values = {_EPOCH_LOSS: self.position.epoch_loss}
        self.position.loss_sum, self.position.loss_steps = 0.0, 0
        if is_evaluated(epoch, self._config.evaluate_every_epochs, self._config.epochs):
            size = self._config.evaluation_batch_size
            batches = partial(
                self._dataset.test_batches,
                size,
                device=self._device,
                dtype=parameter_dtype(self._config),
                channels_last=self._config.channels_last,
            )
            score = score_of(self._engine.outputs(batches, -(-self._dataset.test_size // size)))
            scores = self._team.share(self._team.gather(astuple(score)))
            means = sum((Score(*each) for each in scores), start=Score()).means()
            self.position.evaluation = self._dataset.metrics(means)
            values |= self.position.evaluation
        if not self._is_main:
            return
        self._log(self._engine.step, {"epoch": epoch - 1, **values})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        progress.line(f"epoch {epoch}/{self._config.epochs}  {shown}")

    def _save_if_finite(self) -> None:
        """Write a checkpoint; raise DivergedError on all ranks if a parameter in it is not finite.

        The loss that shows it comes in a later step, and a run that resumed from here would only diverge again.
        """
        state = self._engine.state_dict()
        stage = self._team.share(stage_that_is_not_finite(state))
        self._save(self._checkpoints if stage is None else self._diverged, state)
        if stage is not None:
            raise DivergedError(
                f"a parameter of stage {stage} is not finite after {self._engine.step} training steps; "
                f"{self._saved_states()}. {advice_for(self._config)}"
            )

    def _save(self, store: CheckpointStore, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the engine's state, on rank 0."""
        self._team.positions.enter(f"the checkpoint of step {self._engine.step}")
        tensors = {"engine": state, "torch_random_state": torch.get_rng_state()}
        meta = {**self._facts, "position": asdict(self.position)}
        if self._is_main:
            store.save(self._engine.step, tensors, meta)

    def _saved_states(self) -> str:
        """Say where the state of a run that has diverged is, and the last one before it did."""
        good = self._checkpoints.latest()
        before = f"the last good checkpoint is {good}" if good else "no checkpoint had been due before"
        saved = self._diverged.path_of(self._engine.step)
        return f"the state, after all steps that had begun, is saved in {saved}; {before}"

    def _stop_diverged(self) -> None:
        """If a loss was not finite, save the state away from the checkpoints and raise DivergedError, on all ranks."""
        found = self._team.share(None if self._divergence is None else asdict(self._divergence))
        if found is None:
            return
        self._save(self._diverged, self._engine.state_dict())
        raise DivergedError(Divergence(**found).told(self._config, self._saved_states()))

    def _stop_damaged(self) -> None:
        """Raise DatasetError on all ranks if one has met a damaged image; the caller has written a checkpoint."""
        error = self._lookahead.error
        told = self._team.share(next(filter(None, self._team.gather(None if error is None else str(error))), None))
        if told is not None:
            raise error or DatasetError(told)

    def _keep_trace(self) -> None:
        """Pass the trace on, and keep its totals."""
        trace = self._engine.trace()
        if not self._is_main:
            return
        self._on_trace(trace)
        self.position.traced_until = self._engine.traced_until
        self.position.traced = {
            "memory/activation_peak_bytes_per_device": trace.activation_peak_bytes_per_device,
            "memory/activation_peak_bytes_total": trace.activation_peak_bytes_total,
            "memory/versions_kept": trace.versions_kept,
            "comm/max_messages_per_slot": trace.max_messages_per_slot,
            "comm/max_chain_per_slot": trace.max_chain_per_slot,
        }
        length, asked = self._slots_per_step, self._config.traced_steps
        if trace.measured_slots(length)[0]:
            self.position.traced |= {
                "comm/bytes_per_device_per_step": trace.bytes_sent_per_device_per_step(length),
                "comm/most_bytes_of_a_device_per_step": max(trace.bytes_sent_by_rank(length).values(), default=0.0),
                "comm/messages_per_step": trace.messages_per_step(length),
                _IDLE_SHARE: trace.idle_share(length),
            }
        elif asked and asked <= trace.fill:  # else the run was stopped
            logger.warning(
                "warning: traced_steps=%d ends before the steps repeat, so the summary lacks the idle share, bytes and "
                "messages of a step: use traced_steps=%d or more",
                asked,
                trace.fill + 1,
            )

    @property
    def _units_per_step(self) -> int:
        """Images, or tokens, of a mini-batch."""
        return self._config.batch_size * self._config.task.units(self._config.input_shape)

    def measured(self) -> dict[str, Any]:
        """Return the measured part of the summary, as far as the run has come."""
        position = self.position
        summary: dict[str, Any] = {**position.evaluation, **position.traced, "ledger/reads": position.ledger_reads}
        if math.isfinite(position.epoch_loss):
            summary["train/loss"] = position.epoch_loss
        summary["memory/parameter_bytes_per_device"] = self._parameter_bytes
        summary["memory/optimizer_bytes_per_device"] = self._optimizer_bytes
        summary["memory/delay_bytes_per_device"] = self._delay_bytes
        if self._step_seconds:
            seconds = statistics.median(self._step_seconds)
            summary["time/step_seconds_median"] = seconds
            summary[f"throughput/{self._config.task.unit}_per_second"] = self._units_per_step / seconds
        if self._device.type == "cuda":
            summary["memory/cuda_allocator_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return summary
