"""Weights as a file, under the names of the original model.

A file holds theta of one training step, and BatchNorm's statistics averaged over the workers, as `Engine.model` does.
Plain torchvision, timm or transformers code loads it with strict=True. A run can start from such a file, or from one
with the names of `build_model`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.engine.parameters import average
from cdp_repro.models.registry import original_tensors
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.observe.text import several
from cdp_repro.predict.cutting import model_of
from cdp_repro.schedule.by_name import is_entered
from cdp_repro.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore

SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True)
class Export:
    """What was written."""

    model: str
    step: int
    """Training steps that the weights have seen."""
    tensors: int
    values: int
    """Numbers in all tensors."""


def export(run_dir: Path, path: Path) -> Export:
    """Write the weights of a run's newest checkpoint to a file, whole or not at all.

    Raises:
        RunDirectoryError: `run_dir` is not a run directory.
        CheckpointError: it has no whole checkpoint.
        ConfigError: the suffix of `path` is not one of `SUFFIXES`, or it cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            [f"{path} does not say its form: use {' or '.join(f'{path.stem}{each}' for each in SUFFIXES)}"]
        )
    run = RunDirectory.open(run_dir)
    config = load_config(OmegaConf.create(run.config()), check_device=False)
    checkpoint = CheckpointStore(run.checkpoints_path).load()
    weights = weights_of(config, checkpoint)
    about = {"format": "pt", "model": config.model.name, "training_steps": str(checkpoint.step)}
    try:
        replace_file(path, _content(weights, path.suffix, about))
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror or error}"]) from error
    return Export(config.model.name, checkpoint.step, len(weights), sum(each.numel() for each in weights.values()))


def weights_of(config: RunConfig, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return theta and the averaged buffers of a checkpoint, by their names in the original model.

    Raises:
        CheckpointError: it lacks tensors of the model.
    """
    held: dict[str, Tensor] = {}
    for stage in checkpoint.tensors["engine"]["stages"]:
        versions = stage["versions"]  # they count updates, of which a step may have several
        held |= {**versions[max(versions)], **average(stage["buffers"])}
    model = _without_weights(config)
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names = {key: first[id(tensor)] for key, tensor in _stored(model).items()}  # tied ones are kept once
    if missing := [key for key, name in names.items() if name not in held]:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} lacks {several(missing, limit=3)} of the model"
        )
    # a file of safetensors has no two names for one tensor
    whole = {key: held[name] if key == name else held[name].clone() for key, name in names.items()}
    return {name: tensor.contiguous() for name, tensor in original_tensors(config.model.name, whole).items()}


def _without_weights(config: RunConfig) -> nn.Sequential:
    """Return the model for its names and shapes; the code of an installed package may need values to build it."""
    with nullcontext() if is_entered("models", config.model.name) else torch.device("meta"):
        return model_of(config)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a file of the module's weights holds, by name; one tensor may have several names.

    Buffers that the module does not store have no place there, and neither have extra states (`get_extra_state`), which
    can be anything.
    """
    ours = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {key: each for key, each in module.state_dict(keep_vars=True).items() if id(each) in ours}


def _content(weights: Mapping[str, Tensor], suffix: str, about: Mapping[str, str]) -> bytes:
    if suffix == ".safetensors":
        return safetensors_bytes(dict(weights), dict(about))
    file = io.BytesIO()
    torch.save(dict(weights), file)
    return file.getvalue()


def start_from_file(config: RunConfig, stages: Sequence[nn.Module]) -> str:
    """Copy the weights of the file `model.weights` into the stages; return the file's digest, "" without a file.

    Raises:
        ConfigError: the file cannot be read, or is of another model; the stages are unchanged.
    """
    if config.model.weights is None:
        return ""
    content, found, ours = _read(config, Path(config.model.weights), stages)
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(found[name])
    return hashlib.sha256(content).hexdigest()


def check_weights(config: RunConfig) -> None:
    """Refuse what `start_from_file` would refuse, before a run is started.

    Raises:
        ConfigError: the file cannot be read, or is of another model.
    """
    if config.model.weights is not None:
        _read(config, Path(config.model.weights), [_without_weights(config)])


def _read(
    config: RunConfig, path: Path, parts: Sequence[nn.Module]
) -> tuple[bytes, dict[str, Tensor], dict[str, Tensor]]:
    """Return the content of a file, its tensors, and those of the model's parts, which have the same names and shapes.

    The names are those of the original model, or ours where the file has them.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"model.weights={path} cannot be read: {error.strerror or error}"]) from error
    found = _tensors(content, path)
    own = {key: tensor for part in parts for key, tensor in _stored(part).items()}
    ours = own if own.keys() == found.keys() else original_tensors(config.model.name, own)
    if differing := _differences(found, ours):
        raise ConfigError(
            [
                f"model.weights={path} is of another model than model={config.model.name} with "
                f"{config.dataset.classes} classes and {config.task.shape_text(config.input_shape)}: "
                f"{'; '.join(differing)}"
            ]
        )
    return content, found, ours


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            found = read_safetensors(content)
        else:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are not a pickle can raise anything; torch's own text gives unsafe advice
        raise ConfigError(
            [
                f"model.weights={path} is not a file of weights: give a .safetensors file, or what torch.save has made "
                "of model.state_dict(), with nothing but tensors in it"
            ]
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ConfigError([f"model.weights={path} holds no tensors by name: save model.state_dict()"])
    return dict(found)


def _differences(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> list[str]:
    """Return the names, shapes and kinds of numbers in which a file and a model differ."""
    lacking, foreign = [key for key in ours if key not in theirs], [key for key in theirs if key not in ours]
    both = [(key, theirs[key], tensor) for key, tensor in ours.items() if key in theirs]
    reshaped = [f"{key} is {_shape(a)} there and {_shape(b)} here" for key, a, b in both if a.shape != b.shape]
    other = [f"{key} is {a.dtype} there and {b.dtype} here" for key, a, b in both if _kind(a) != _kind(b)]
    parts = (("it lacks", lacking), ("it has", foreign), ("", reshaped), ("", other))
    return [f"{verb} {several(items, limit=3)}".strip() for verb, items in parts if items]


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Return what a copy to another type must not change: whether numbers have fractions, and whether two parts."""
    return tensor.is_floating_point(), tensor.is_complex()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
