"""The parts of a run, made from its configuration: data set, cut model, and the engine or a library in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cdp_repro.baselines import baseline_class
from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.numerics import autocast, delay_factory, loss_fn
from cdp_repro.data import Dataset, load_dataset, steps_per_epoch
from cdp_repro.engine.engine import Engine
from cdp_repro.launch.team import Team
from cdp_repro.predict.cutting import CutModel, cut_alike, cut_model
from cdp_repro.predict.remembered_cuts import remember
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.schedule import Program, Schedule
from cdp_repro.training.optim import learning_rate_factor, optimizer_factory

if TYPE_CHECKING:
    from cdp_repro.baselines.baseline import Baseline


def load_data(config: RunConfig) -> Dataset:
    """Load the data set and check that its classes, shape and number of samples fit the configuration."""
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
        context=config.model.context,
        tokens=wanted.tokens,
    )
    if dataset.classes != wanted.classes:
        raise ConfigError(
            [
                f"dataset.classes={wanted.classes}, but {dataset.description} has {dataset.classes}: "
                f"use dataset.classes={dataset.classes}"
            ]
        )
    if dataset.input_shape != config.input_shape:
        raise ConfigError(
            [
                f"{config.task.sample}s are {dataset.input_shape}, the configuration says {config.input_shape}: "
                f"{_shape_advice(dataset.input_shape)}"
            ]
        )
    if dataset.train_size < config.batch_size:
        largest = dataset.train_size // config.sample_parts * config.sample_parts
        fewer = f"at most batch_size={dataset.train_size}, in fewer micro-batches than {config.sample_parts}"
        works = f"at most batch_size={largest}" if largest else fewer
        raise ConfigError(
            [
                f"batch_size={config.batch_size} is more than the {dataset.train_size} training {config.task.sample}s: "
                f"use {works}"
            ]
        )
    return dataset


def _shape_advice(shape: Sequence[int]) -> str:
    if len(shape) == 3 and shape[1] == shape[2]:
        return f"use dataset.channels={shape[0]} dataset.image_size={shape[1]}"
    return "give square images, (channels, size, size)"


def team_of(config: RunConfig) -> Team:
    """Return the ranks of a run, of which this process is one; raise ValueError if there are not so many."""
    wanted_by = f"baseline {config.baseline}" if config.baseline else str(config.spec())
    return Team(config.processes, config.torch_device, wanted_by)


def same_cut(config: RunConfig, team: Team, blocks_per_stage: Sequence[int] | None = None) -> CutModel:
    """Cut the model on every rank as on rank 0, which alone measures it: two measurements of time may differ."""
    own = cut_model(config, blocks_per_stage) if team.rank == 0 else None
    if own is not None and blocks_per_stage is None:
        remember(config, own)
    shared = team.share(own.to_dict() if own else {})
    return own or cut_alike(config, StageCut.from_dict(shared))


def reading_rule(schedule: Schedule, engine: Engine | Baseline) -> Callable[[int, int], bool]:
    """Return the function (step, part) -> whether this rank runs a stage that reads that part of the mini-batch."""
    if not isinstance(engine, Engine):
        return lambda _, micro_batch: engine.reads_inputs(micro_batch)
    rank_of, sizes = schedule.placement.rank_of, schedule.sizes
    first = [stage for stage, read in enumerate(sizes.sources) if not read]

    def reads(step: int, part: int) -> bool:
        m = step * sizes.micro_batches + sizes.with_samples(part)
        return any(rank_of(m, stage) == engine.rank for stage in first)

    return reads


def build_engine(config: RunConfig, cut: CutModel, train_size: int, program: Program) -> Engine | Baseline:
    """Return the engine, or a baseline in its place, that trains a model cut into stages; all ranks must call it.

    Args:
        config: The run's configuration.
        cut: The run's model.
        train_size: The number of training samples, from which the learning-rate schedule counts its epochs.
        program: What `program_of` returned.
    """
    device = config.torch_device
    epoch = steps_per_epoch(train_size, config.batch_size)
    model = cut.stages, loss_fn, optimizer_factory(config.optim, cut.stages, config.sources or ())
    common: dict[str, Any] = {
        "workers": config.workers,
        "device": device,
        "seed": config.seed,
        "learning_rate_factor": learning_rate_factor(config.optim, epoch, config.epochs),
        "autocast": autocast(config, device.type),
    }
    if config.baseline is not None:
        return baseline_class(config.baseline)(*model, **common)
    return Engine(
        *model,
        program=program,
        delay=delay_factory(config.delay),
        clip_norm=config.optim.clip_norm,
        traced_steps=config.traced_steps,
        **common,
    )
