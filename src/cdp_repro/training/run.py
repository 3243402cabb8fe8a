"""One run from a configuration to a finished run directory."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cdp_repro.config import RunConfig
from cdp_repro.config.loading import without_effect
from cdp_repro.config.program_file import program_of
from cdp_repro.data import Dataset, DatasetError
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.launch.process_group import process_group, refuse_differing
from cdp_repro.launch.signals import StopRequest
from cdp_repro.launch.team import Team
from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError, arguments_to_go_on
from cdp_repro.observe.text import mode_text
from cdp_repro.observe.trace_files import mirror_trace, remove_trace_files, write_trace_files
from cdp_repro.observe.versions import code_hash, short, versions_since
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.cutting import CutModel, measure_cut
from cdp_repro.predict.device_memory import device_memory, totals_of
from cdp_repro.predict.simulate import simulate_totals, version_bytes
from cdp_repro.schedule import Program
from cdp_repro.trace import Trace
from cdp_repro.training.assembly import build_engine, load_data, same_cut, team_of
from cdp_repro.training.checkpoint import CheckpointStore
from cdp_repro.training.divergence import DivergedError
from cdp_repro.training.earlier_run import EarlierRun, open_earlier
from cdp_repro.training.records import Records, log_file, opened_records
from cdp_repro.training.resuming import refuse_foreign
from cdp_repro.training.trainer import Interrupted, Trainer
from cdp_repro.training.weights import start_from_file

logger = logging.getLogger("cdp_repro")

_OF_ROUNDING = {"version/torch": "another torch", "hardware": "other hardware, or with another number of threads"}
"""Versions on which it depends how numbers are rounded, with the words for another one."""


def train(
    config: RunConfig, run_dir: Path, command: Sequence[str], resume: bool = False, restart: bool = False
) -> dict[str, Any]:
    """Train as `config` says, in a new run directory or, with `resume`, in that of an earlier run.

    Every rank of the placement must call it (`launch` starts them). Only rank 0 touches the run directory, except for
    the log of each rank. With `restart`, a run without a checkpoint begins anew.

    Returns:
        What summary.json holds; on ranks other than 0 an empty summary, unless the run was finished already.

    Raises:
        ConfigError, DatasetError, ModelError, CheckpointError, RunDirectoryError, LaunchError: the user's mistakes.
        Interrupted, DivergedError: the run has stopped early; summary.json says so.
        StalledError: other ranks do not answer.
    """
    device, processes = config.torch_device, config.processes
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True  # a resumed run must equal the uninterrupted one
    else:
        keep_freed_memory()
    with process_group(device, processes, config.timeout_seconds), ExitStack() as stack:
        team = team_of(config)
        stack.enter_context(team.naming_stalled())
        directory, earlier = None, EarlierRun()
        if resume:
            team.positions.enter("reading the checkpoint")
            if team.rank == 0:
                directory, earlier = open_earlier(run_dir, restart, stack)
            earlier = earlier.shared(team)
        if earlier.summary is not None:
            logger.info("%s is finished already", run_dir)
            return earlier.summary
        parts = _parts(config, team, earlier)
        team.positions.enter("opening the run directory")
        if directory is not None:
            directory.add_command(command)
        elif team.rank == 0:
            directory = stack.enter_context(RunDirectory.create(run_dir, config.to_dict(), command).locked())
        path = Path(team.share(str(directory.path if directory else run_dir)))
        stop = stack.enter_context(StopRequest())
        stack.enter_context(log_file(RunDirectory(path).log_path(team.rank)))
        records = stack.enter_context(opened_records(config, directory)) if directory else None
        if team.rank == 0:
            for sentence in without_effect(config):
                logger.warning("warning: %s", sentence)
        return _Run(config, parts, earlier, directory or RunDirectory(path), records, command).train(stop, resume)


@dataclass(frozen=True)
class _Parts:
    """What a run is made of, the same on all ranks."""

    dataset: Dataset
    cut: CutModel
    program: Program


def _parts(config: RunConfig, team: Team, earlier: EarlierRun) -> _Parts:
    """Load the data, cut the model and make the program; refuse a run whose ranks would differ in them."""
    if earlier.checkpoint is not None:  # before anything slow; the data are compared by `Trainer.resume`
        refuse_foreign(earlier.checkpoint.meta, {"config": config.to_dict()})
    team.positions.enter("reading the data")
    dataset = load_data(config)
    team.positions.enter("cutting the model")
    cut = same_cut(config, team, earlier.blocks_per_stage)
    program = program_of(config, cut.costs.gradient_bytes)
    weights = "" if earlier.checkpoint else start_from_file(config, cut.stages)
    settings = {**config.to_dict(), "run_dir": None}
    refuse_differing(
        {
            "code": code_hash(),
            "config": _digest(settings),
            "data": _digest(dataset.fingerprint()),
            "weights": weights,
        },
        team.control,
    )
    return _Parts(dataset, cut, program)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class _Run:
    """One run: builds engine and trainer, and writes their measurements."""

    def __init__(
        self,
        config: RunConfig,
        parts: _Parts,
        earlier: EarlierRun,
        directory: RunDirectory,
        records: Records | None,
        command: Sequence[str],
    ) -> None:
        """`records` is None on ranks that write none."""
        self._config = config
        self._dataset = parts.dataset
        self._cut = parts.cut
        self._program = parts.program
        self._earlier = earlier
        self._directory = directory
        self._records = records
        self._command = command
        self._versions = versions_since(earlier.versions)
        self._data = {"description": parts.dataset.description, "fingerprint": parts.dataset.fingerprint()}
        self._engine = build_engine(config, parts.cut, parts.dataset.train_size, parts.program)
        self._trainer = self._build_trainer()
        self._trace: Trace | None = None

    def _build_trainer(self) -> Trainer:
        facts = {
            "config": self._config.to_dict(),
            "data": self._data,
            "blocks_per_stage": self._cut.blocks_per_stage,
            "versions": self._versions,
        }
        return Trainer(
            self._config,
            self._dataset,
            self._engine,
            self._program.schedule,
            self._records.metrics if self._records else None,
            self._store(self._directory.checkpoints_path, keep=self._config.keep_checkpoints),
            self._store(self._directory.path / "diverged", keep=1),
            facts,
            self._write_trace,
        )

    def _store(self, path: Path, keep: int) -> CheckpointStore:
        return CheckpointStore(path, keep, self._directory.refuse_replaced)

    def train(self, stop: StopRequest, resume: bool) -> dict[str, Any]:
        config = self._config
        logger.info(
            "%s on %s, %s, N = %d workers, S = %d stages, %s on %s%s",
            config.model.name, self._dataset.description, mode_text(config.mode.name, config.delay.name),
            config.workers, config.stage_count, config.baseline or config.placement.name, config.torch_device,
            f" in {self._engine.team.size} processes" if self._engine.team.size > 1 else "",
        )  # fmt: skip
        torch.manual_seed(config.seed)  # for what a model or loss draws on its own; a checkpoint keeps this state
        if resume:
            self._trainer.resume(self._earlier.checkpoint)
            logger.info("resumed at training step %d", self._engine.step)
            self._warn_of_what_changed()
        try:
            self._trainer.fit(stop)
        except BaseException as error:
            try:
                self._finish(_status_of(error))
            except (OSError, RunDirectoryError) as second:  # e.g. a full disk: report what ended the run, and this too
                error.add_note(f"and the end of the run could not be recorded: {second}")
            if isinstance(error, DatasetError):  # a damaged image: a checkpoint holds what was trained before
                way_on = shlex.join(["cdp-train", *arguments_to_go_on(self._directory.path)])
                raise DatasetError(f"{error}\nWith the data whole again, this run goes on by: {way_on}") from error
            raise
        return self._finish("finished")

    def _warn_of_what_changed(self) -> None:
        """Warn if the run goes on by what has not trained it before, as far as that is known."""
        earlier = self._earlier.versions
        changed = {name for name, present in self._versions.items() if earlier.get(name, present) != present}
        if self._engine.team.rank:
            return
        if "version/code" in changed:
            logger.warning(
                "warning: this run goes on by other code than it has been trained by; its summary names all of them, "
                "code %s (commit %s), and no table averages it with runs of one",
                self._versions["version/code"],
                short(self._versions["version/git_commit"]),
            )
        for name, other in _OF_ROUNDING.items():
            if name in changed:
                logger.warning(
                    "warning: this run goes on by %s (%s): it ends as if it had not been stopped up to rounding, not "
                    "bit for bit",
                    other,
                    self._versions[name],
                )

    def _finish(self, status: str) -> dict[str, Any]:
        """Write summary.json and close the logs, on rank 0; return the summary."""
        if self._records is None:
            return {}
        program = self._program
        whole = self._config.reading_whole()
        costs_of_dp = self._cut.costs if whole is self._config else measure_cut(whole, self._cut.blocks_per_stage).costs
        summary = {
            **self._described(status),
            **self._trainer.measured(),
            "memory/predicted_parameter_bytes_per_device": 0,
            "memory/activation_peak_bytes_simulated_dp": _simulated_peak(program.data_parallel(), costs_of_dp),
        }
        if self._config.baseline is None:  # the schedule of a baseline is the library's, and reads nothing late
            totals = totals_of(self._config, self._cut, program)
            memory = device_memory(self._config, self._cut, program, totals)
            summary["memory/activation_peak_bytes_simulated"] = max(total.activation_bytes for total in totals)
            summary["memory/bytes_per_device_simulated"] = memory.together
            summary["memory/predicted_parameter_bytes_per_device"] = memory.copies
        self._directory.write_summary(summary)
        self._records.metrics.close()
        if self._config.wandb != "disabled" and self._trace is not None:
            mirror_trace(self._trace, self._config.mode.name, self._directory, self._records.mirror)
        self._records.mirror.finish(summary, exit_code=0 if status == "finished" else 1)
        return summary

    def _described(self, status: str) -> dict[str, Any]:
        config = self._config
        return {
            "status": status,
            "mode": config.mode.name,
            "placement": config.placement.name,
            "workers": config.workers,
            "stages": config.stage_count,
            "accumulate": config.accumulate,
            "replicas": config.replicas,
            "baseline": config.baseline,
            "ranks": self._engine.team.size,
            "dataset": config.dataset.name,
            **{f"dataset/{key}": value for key, value in self._data.items()},
            "model": config.model.name,
            "optim": config.optim.name,
            "delay": config.delay.name,
            "seed": config.seed,
            "epochs": config.epochs,
            "step": self._engine.step,
            "staleness": [list(row) for row in self._program.schedule.rule.matrix],
            "stages/blocks": [list(names) for names in self._cut.block_names],
            "stages/imbalance": self._cut.imbalance,
            "stages/costs": {name: list(values) for name, values in asdict(self._cut.costs).items()},
            "run_dir": str(self._directory.path),
            "command": list(self._command),
            "config": config.to_dict(),
            **self._versions,
        }

    def _write_trace(self, trace: Trace | None) -> None:
        """Write the trace as files, and keep it for W&B; None removes the files of one that does not count."""
        self._trace = trace
        if trace is None:
            remove_trace_files(self._directory)
        else:
            write_trace_files(trace, self._directory, version_bytes(self._program.schedule, self._cut.costs))


def _status_of(error: BaseException) -> str:
    """Return what the summary calls a run that has ended by an error."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted"
    return "diverged" if isinstance(error, DivergedError) else "failed"


def _simulated_peak(program: Program, costs: StageCosts) -> int:
    totals = simulate_totals(program.schedule, costs, program.complete_run)
    return max(total.activation_bytes for total in totals)
