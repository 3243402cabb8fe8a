"""One run from a configuration to a finished run directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import cdp_repro
from cdp_repro.baselines import BASELINES, Baseline
from cdp_repro.config import ConfigError, RunConfig, without_effect
from cdp_repro.data import Dataset, load_dataset, steps_per_epoch
from cdp_repro.engine.allocator import keep_freed_memory
from cdp_repro.engine.engine import Engine
from cdp_repro.engine.team import Team
from cdp_repro.process_group import code_hash, process_group, refuse_differing
from cdp_repro.schedule import Schedule, Slot, Trace, simulate
from cdp_repro.schedule.render import write_comms_csv, write_memory_csv, write_perfetto
from cdp_repro.stages import CutModel, autocast, cut_model, loss_fn
from cdp_repro.training.checkpoint import Checkpoint, CheckpointStore
from cdp_repro.training.optim import learning_rate_factor, optimizer_factory
from cdp_repro.training.signals import StopRequest
from cdp_repro.training.tracking import MetricsLog, RunDirectory
from cdp_repro.training.trainer import DivergedError, Interrupted, Trainer
from cdp_repro.training.wandb_mirror import WandbMirror, previous_run_id

logger = logging.getLogger("cdp_repro")

_NUMERICS = ("schedule", "engine", "baselines", "models", "data", "training", "stages.py", "partition.py")
"""The parts of the package of which the numbers of a run depend: runs that share them are of one code version."""


def train(config: RunConfig, run_dir: Path, command: Sequence[str], resume: bool = False) -> dict[str, Any]:
    """Train as `config` says, in a new run directory or, to `resume`, in that of the run that goes on.

    Every rank of the placement must call it (`launch` starts them); only rank 0 touches the run directory, but for
    the log of each rank.

    Returns:
        What summary.json holds; on ranks other than 0 an empty summary.

    Raises:
        ConfigError, DatasetError, ModelError, CheckpointError, RunDirectoryError, LaunchError: the user's mistakes.
        Interrupted, DivergedError: the run has stopped early; summary.json says so.
    """
    device, schedule = config.torch_device, config.schedule()
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True  # a resumed run must equal the uninterrupted one
    else:
        keep_freed_memory()
    with process_group(device, config.ranks, config.timeout_seconds), ExitStack() as stack:
        team = Team(config.ranks, device, f"baseline {config.baseline}" if config.baseline else str(schedule))
        directory, checkpoint = None, None
        if resume and team.rank == 0:
            directory = stack.enter_context(RunDirectory.open(run_dir).locked())
            checkpoint = _newest_checkpoint(directory)
        finished, checkpoint = team.share((_finished(directory), checkpoint))
        if finished is not None:
            logger.info("%s is finished already", finished["run_dir"])
            return finished
        dataset = load_data(config)
        cut = _same_cut(config, team, checkpoint.meta.get("blocks_per_stage") if checkpoint else None)
        settings = {**config.to_dict(), "run_dir": None}
        refuse_differing({"code": code_hash(), "config": _digest(settings), "data": _digest(dataset.fingerprint())})
        if directory is not None:
            directory.add_command(command)
        elif team.rank == 0:
            directory = stack.enter_context(RunDirectory.create(run_dir, config.to_dict(), command).locked())
        path = team.share(directory.path if directory else run_dir)
        stop = stack.enter_context(StopRequest())
        stack.enter_context(_log_file(RunDirectory(path).log_path(team.rank)))
        files = stack.enter_context(_files(config, directory)) if directory else None
        if team.rank == 0:
            for sentence in without_effect(config):
                logger.warning("warning: %s", sentence)
        return _Run(config, dataset, cut, RunDirectory(path), files, command).train(stop, checkpoint, resume)


def _same_cut(config: RunConfig, team: Team, blocks_per_stage: Sequence[int] | None) -> CutModel:
    """Cut the model on every rank as on rank 0, whatever each would measure."""
    own = cut_model(config, blocks_per_stage) if team.rank == 0 else None
    blocks = team.share([len(names) for names in own.block_names] if own else None)
    return own or cut_model(config, blocks)


def _newest_checkpoint(directory: RunDirectory) -> Checkpoint | None:
    store = CheckpointStore(directory.checkpoints_path)
    return store.load() if _finished(directory) is None and store.latest() else None


def _finished(directory: RunDirectory | None) -> dict[str, Any] | None:
    """Return the summary of a run that is finished already."""
    summary = directory.summary() if directory else {}
    return summary if summary.get("status") == "finished" else None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def load_data(config: RunConfig) -> Dataset:
    """Load the data and check that it is what the configuration says."""
    wanted = config.dataset
    dataset = load_dataset(
        wanted.name,
        root=wanted.root,
        image_size=wanted.image_size,
        download=wanted.download,
        classes=wanted.classes,
        train_samples=wanted.train_samples,
        test_samples=wanted.test_samples,
        seed=config.seed,
        loader_workers=wanted.loader_workers,
    )
    if dataset.classes != wanted.classes:
        raise ConfigError(
            [
                f"dataset.classes={wanted.classes}, but {dataset.description} has {dataset.classes}: "
                f"use dataset.classes={dataset.classes}"
            ]
        )
    if dataset.input_shape != config.input_shape:
        raise ConfigError([f"images are {dataset.input_shape}, the configuration says {config.input_shape}"])
    if dataset.train_size < config.batch_size:
        largest = dataset.train_size // config.workers * config.workers
        works = f"at most batch_size={largest}" if largest else f"at most workers={dataset.train_size}"
        raise ConfigError(
            [f"batch_size={config.batch_size} is more than the {dataset.train_size} training images: use {works}"]
        )
    return dataset


def build_engine(config: RunConfig, cut: CutModel, train_size: int) -> Engine | Baseline:
    """Return the engine, or the library's in its place, that trains a model cut into stages; all ranks must call it.

    `train_size` is the number of training images, of which the learning rate's schedule depends.
    """
    device = config.torch_device
    epoch = steps_per_epoch(train_size, config.batch_size)
    model = cut.stages, loss_fn, optimizer_factory(config.optim)
    common: dict[str, Any] = {
        "workers": config.workers,
        "device": device,
        "seed": config.seed,
        "learning_rate_factor": learning_rate_factor(config.optim, epoch, config.epochs),
        "autocast": autocast(config, device.type),
    }
    if config.baseline is not None:
        return BASELINES[config.baseline](*model, **common)
    return Engine(
        *model,
        config.mode.rule,
        config.placement.name,
        replicas=config.replicas,
        pipeline_schedule=config.pipeline_schedule,
        collectives=config.collectives,
        slot_order=config.slot_order,
        traced_steps=config.traced_steps,
        **common,
    )


@dataclass(frozen=True)
class _Files:
    """What rank 0 writes while it trains."""

    metrics: MetricsLog
    mirror: WandbMirror


class _Run:
    """Builds engine and trainer, and writes what they measured."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        cut: CutModel,
        directory: RunDirectory,
        files: _Files | None,
        command: Sequence[str],
    ) -> None:
        """`files` are None on ranks that write none."""
        self._config = config
        self._dataset = dataset
        self._cut = cut
        self._directory = directory
        self._files = files
        self._command = command
        self._data = {"description": dataset.description, "fingerprint": dataset.fingerprint()}
        self._engine = build_engine(config, cut, dataset.train_size)
        self._trainer = self._build_trainer()
        self._trace: Trace | None = None

    def _build_trainer(self) -> Trainer:
        facts = {
            "config": self._config.to_dict(),
            "data": self._data,
            "blocks_per_stage": [len(names) for names in self._cut.block_names],
            "versions": versions(),
        }
        return Trainer(
            self._config,
            self._dataset,
            self._engine,
            self._files.metrics if self._files else None,
            CheckpointStore(self._directory.checkpoints_path, keep=self._config.keep_checkpoints),
            CheckpointStore(self._directory.path / "diverged", keep=1),
            facts,
            self._write_trace,
        )

    def train(self, stop: StopRequest, checkpoint: Checkpoint | None, resume: bool) -> dict[str, Any]:
        config = self._config
        logger.info(
            "%s on %s, %s, N = %d workers, S = %d stages, %s on %s%s",
            config.model.name, self._dataset.description, config.mode.name, config.workers, config.stage_count,
            config.baseline or config.placement.name, config.torch_device,
            f" in {config.ranks} processes" if config.ranks > 1 else "",
        )  # fmt: skip
        torch.manual_seed(config.seed)  # of what a model or loss draws on its own; the checkpoint goes on from it
        if resume:
            self._trainer.resume(checkpoint)
            logger.info("resumed at training step %d", self._engine.step)
        status = "failed"
        try:
            self._trainer.fit(stop)
            status = "finished"
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
            raise
        except DivergedError:
            status = "diverged"
            raise
        finally:
            summary = self._finish(status)
        return summary

    def _finish(self, status: str) -> dict[str, Any]:
        """Write summary.json and close the logs, on rank 0; return the summary."""
        if self._files is None:
            return {}
        schedule = self._config.schedule()
        summary = {
            **self._described(status),
            **self._trainer.measured(),
            "memory/activation_peak_bytes_simulated": self._simulated_peak(schedule),
            "memory/activation_peak_bytes_simulated_dp": self._simulated_peak(schedule.data_parallel()),
        }
        self._directory.write_summary(summary)
        self._files.metrics.close()
        self._mirror_trace(self._files.mirror)
        self._files.mirror.finish(summary, exit_code=0 if status == "finished" else 1)
        return summary

    def _described(self, status: str) -> dict[str, Any]:
        config = self._config
        return {
            "status": status,
            "mode": config.mode.name,
            "placement": config.placement.name,
            "workers": config.workers,
            "stages": config.stage_count,
            "replicas": config.replicas,
            "baseline": config.baseline,
            "ranks": config.ranks,
            "dataset": config.dataset.name,
            **{f"dataset/{key}": value for key, value in self._data.items()},
            "model": config.model.name,
            "seed": config.seed,
            "epochs": config.epochs,
            "step": self._engine.step,
            "staleness": [list(row) for row in config.schedule().mode.staleness],
            "stages/blocks": [list(names) for names in self._cut.block_names],
            "stages/imbalance": self._cut.imbalance,
            "stages/costs": {name: list(values) for name, values in asdict(self._cut.costs).items()},
            "run_dir": str(self._directory.path),
            "command": list(self._command),
            "config": config.to_dict(),
            **versions(),
        }

    def _simulated_peak(self, schedule: Schedule) -> int:
        return simulate(schedule, self._cut.costs, steps=2).activation_peak_bytes_total

    def _write_trace(self, trace: Trace) -> None:
        """Write what has been traced, and keep it for W&B."""
        self._trace = trace
        with self._directory.trace_path.open("w") as file:
            write_perfetto(trace, file)
        with self._directory.memory_path.open("w") as file:
            write_memory_csv(trace, file, self._cut.costs.parameter_bytes, self._config.schedule().placement)
        with self._directory.comms_path.open("w") as file:
            write_comms_csv(trace, file)

    def _mirror_trace(self, mirror: WandbMirror) -> None:
        """Log timeline, memory, ledger and messages to W&B: tables, pictures, an artifact."""
        trace = self._trace
        if self._config.wandb == "disabled" or trace is None:
            return
        reads = [
            (record.slot, str(action), *divmod(action.micro_batch, trace.workers), action.stage, action.version)
            for record in trace.records
            for action in record.actions
            if action.op.is_compute and action.micro_batch is not None
        ]
        mirror.log_table("ledger", ["slot", "action", "step", "worker", "stage", "version"], reads)
        sent = [(m.slot, m.source, m.destination, m.kind, m.stage, m.bytes) for m in trace.messages]
        mirror.log_table("messages", ["slot", "source", "destination", "kind", "stage", "bytes"], sent)
        curve = trace.activation_bytes_per_slot
        mirror.log_table("memory", ["slot", "activation_bytes"], list(curve.items()))
        pictures = self._directory.path / "wandb"
        os.environ.setdefault("MPLCONFIGDIR", str(pictures / "matplotlib"))  # else it writes to the user's home
        from cdp_repro.figures import memory_figure, save_figure, timeline_figure

        slots = [Slot(record.slot, record.actions) for record in trace.records][: 6 * trace.stages]
        name = self._config.mode.name
        save_figure(timeline_figure({name: slots}, trace.workers, trace.stages), pictures / "timeline.png")
        save_figure(memory_figure({name: curve}, "live activation bytes"), pictures / "memory.png")
        mirror.log_image("timeline", pictures / "timeline.png")
        mirror.log_image("memory_curve", pictures / "memory.png")
        files = [self._directory.trace_path, self._directory.memory_path, self._directory.comms_path]
        mirror.log_artifact(f"trace-{self._directory.path.name}", "trace", files)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, and the hardware it was measured on."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "version/cdp_repro": cdp_repro.__version__,
        "version/git_commit": _git_commit(),
        "version/code": code_hash(_NUMERICS)[:16],
        "version/torch": torch.__version__,
        "version/python": platform.python_version(),
        "hardware": f"{hardware}, {torch.get_num_threads()} CPU threads",
    }


def _git_commit() -> str:
    """Return the commit of the source tree that runs, with "-dirty" if it was changed; "unknown" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Write what the package logs to `path`, too."""
    path.parent.mkdir(parents=True, exist_ok=True)  # on another host there is no run directory yet
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _files(config: RunConfig, directory: RunDirectory) -> Iterator[_Files]:
    """Open the metrics and start the W&B mirror; an error in the body ends it as failed."""
    mirror = WandbMirror()
    mirror.start(
        config.wandb,  # type: ignore[arg-type]  # one of the choices, as config checks
        directory.path,
        config.to_dict(),
        name=directory.path.name,
        project=config.wandb_project,
        resume_id=previous_run_id(directory.path),
    )
    try:
        yield _Files(MetricsLog(directory.metrics_path, mirror), mirror)
    finally:
        mirror.finish({}, exit_code=1)  # does nothing after the regular end
