"""A model cut into stages of equal predicted cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor, nn

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.fitting import sizes_that_fit
from cdp_repro.config.numerics import autocast, loss_fn, parameter_dtype
from cdp_repro.engine.arguments import refuse_shared_parameters
from cdp_repro.engine.compute import Network
from cdp_repro.models import ModelError, ModelSpec, build_model, cut
from cdp_repro.models.chain import Branched, hidden_matrices, segments
from cdp_repro.predict.partition import StagesError, partition_branches
from cdp_repro.predict.profiling import profile_passes, profile_stages, time_stages
from cdp_repro.predict.stage_cut import StageCut, follows_from_shapes
from cdp_repro.schedule.by_name import EntryError


@dataclass(frozen=True)
class CutModel(StageCut):
    """A model cut into stages."""

    stages: tuple[nn.Sequential, ...]


def measure_cut(config: RunConfig, blocks_per_stage: Sequence[int] | None = None) -> StageCut:
    """Return what `cut_model` measures; without making weights, however large the model is, if shapes are enough."""
    by_shapes = follows_from_shapes(config.partition, config.model.name)
    return cut_model(config, blocks_per_stage, has_weights=not by_shapes)


def cut_model(
    config: RunConfig, blocks_per_stage: Sequence[int] | None = None, *, has_weights: bool = True
) -> CutModel:
    """Build the model of the configuration and cut it as `partition` says, or as `blocks_per_stage` says if given.

    Without weights, its tensors are on the meta device.

    Raises:
        ModelError: a model that is unknown or cannot be cut.
        ConfigError: more stages than the model has blocks, or a micro-batch that the model cannot train on.
    """
    try:
        return _cut_model(config, blocks_per_stage, has_weights)
    except ValueError as error:
        if isinstance(error, (ConfigError, ModelError, EntryError)):
            raise
        cannot = (
            f"be cut into {config.stage_count} stages"
            if isinstance(error, StagesError)
            else f"train on a micro-batch of {config.micro_batch_shape[0]}"
        )
        said = f"model={config.model.name} cannot {cannot}: {error}"
        if isinstance(error, StagesError) and (works := sizes_that_fit(config, error.most)):
            said += f"; with the other values, {works} would fit"
        raise ConfigError([said]) from error


def cut_alike(config: RunConfig, known: StageCut) -> CutModel:
    """Build the model of the configuration and cut it as `known`, which another rank has measured."""
    model = _typed_model(config, has_weights=True)
    stages = tuple(cut(model, _ranges(known.blocks_per_stage), config.sources or ()))
    return CutModel(**{field.name: getattr(known, field.name) for field in fields(StageCut)}, stages=stages)


def _cut_model(config: RunConfig, blocks_per_stage: Sequence[int] | None, has_weights: bool) -> CutModel:
    model = _typed_model(config, has_weights)
    costs = _block_costs(config, model)
    if blocks_per_stage is None:
        ranges = partition_branches(costs, segments(model), config.stage_count)
    else:
        ranges = _ranges(blocks_per_stage)
    sources = config.sources or ()
    stages = tuple(cut(model, ranges, sources))
    try:
        refuse_shared_parameters(stages)
    except ValueError as error:
        raise ModelError(f"model={config.model.name} cannot be cut: {error}") from error
    trained = [[parameter for parameter in stage.parameters() if parameter.requires_grad] for stage in stages]
    hidden = hidden_matrices(stages, sources)
    return CutModel(
        stages=stages,
        block_names=tuple(tuple(name for name, _ in stage.named_children()) for stage in stages),
        costs=profile_stages(
            Network(stages, _checked_loss(config.dataset.classes), autocast(config, "cpu"), sources),
            *sample(config, "cpu"),
            slices=config.slices_of_a_sequence,
        ),
        balanced=tuple(sum(costs[index] for index in run) for run in ranges),
        trained_bytes=tuple(sum(each.nbytes for each in stage) for stage in trained),
        hidden_bytes=tuple(sum(each.nbytes for each in stage if each in hidden) for stage in trained),
    )


def _typed_model(config: RunConfig, has_weights: bool) -> nn.Sequential:
    """Return the model with numbers of the type, and in the layout, that the configuration asks for."""
    with nullcontext() if has_weights else torch.device("meta"):
        model = model_of(config)
    real = parameter_dtype(config)
    for part in model.modules():  # `to` would make complex numbers real
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.data = tensor.data.to(_of_kind(tensor, real))
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def _of_kind(tensor: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """Return the type of a tensor where fractions have the type `real`: complex ones stay complex, whole ones whole."""
    if tensor.is_complex():
        return real.to_complex()
    return real if tensor.is_floating_point() else tensor.dtype


def _ranges(blocks_per_stage: Sequence[int]) -> list[range]:
    ends = accumulate(blocks_per_stage)
    return [range(end - size, end) for end, size in zip(ends, blocks_per_stage, strict=True)]


def model_of(config: RunConfig) -> nn.Sequential:
    """Return the model of the configuration, with the initial weights of its seed."""
    model = config.model
    spec = ModelSpec(
        config.input_shape, config.dataset.classes, model.hidden, model.depth, model.dropout, model.width, model.heads
    )
    return build_model(model.name, spec, config.seed)


def _block_costs(config: RunConfig, model: nn.Sequential) -> Sequence[float]:
    blocks, sources = list(model), model.sources if isinstance(model, Branched) else ()
    if config.partition == "time":
        device = config.torch_device
        model.to(device)
        network = Network(blocks, loss_fn, autocast(config, device.type), sources)
        seconds = time_stages(network, *sample(config.reading_whole(), device))
        model.to("cpu")
        return seconds
    if config.partition == "parameters":
        return [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    inputs = sample(config.reading_whole(), "cpu")  # the same cut, whether or not sequences are cut
    loss = _checked_loss(config.dataset.classes)
    forward, backward, _ = profile_passes(Network(blocks, loss, autocast(config, "cpu"), sources), *inputs)
    if config.partition == "activations":
        return [came for came, _ in forward]
    return [there + back for (_, there), (_, back) in zip(forward, backward, strict=True)]


def _checked_loss(classes: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss for a measurement, which refuses outputs that are not a number for each target and class."""

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != (*targets.shape, classes):
            raise ValueError(
                f"it gives {[*outputs.shape]} for {len(targets)} samples of dataset.classes={classes}: it must give "
                f"{[*targets.shape, classes]}"
            )
        return loss_fn(outputs, targets)

    return checked


def sample(config: RunConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return a micro-batch of zeros for profiling: inputs [B/M, ...] and targets [B/M], or [B/M, tokens] for text."""
    shape, task = config.micro_batch_shape, config.task
    kind = torch.int64 if task.is_text else parameter_dtype(config)
    inputs = torch.zeros(*shape, dtype=kind, device=device)
    if config.channels_last and not task.is_text:
        inputs = inputs.to(memory_format=torch.channels_last)
    return inputs, torch.zeros(*shape if task.is_text else shape[:1], dtype=torch.long, device=device)
