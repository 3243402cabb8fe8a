"""Cuts that earlier plans and runs have measured, in the user's cache: a plan of a model seen before needs no torch.

Importing torch and torchvision and tracing the model take most of a plan's time. The result depends on little: the
model, the micro-batch, the stages, and the code. Each combination has a file, `~/.cache/cdp-repro/cuts/<hash>.json`, or
one below XDG_CACHE_HOME. The folder can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cdp_repro.config import RunConfig
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.versions import code_hash
from cdp_repro.predict.stage_cut import StageCut, follows_from_shapes
from cdp_repro.schedule.garbage import without_collection

_CODE = ("models", "engine", "predict", "config", "schedule")
"""The parts of the package that a cut depends on."""

_LIBRARIES = ("torch", "torchvision", "timm")


def stage_cut(config: RunConfig) -> StageCut:
    """Return what `cutting.measure_cut` does, without the modules; measured only if no earlier plan or run has.

    Raises:
        ModelError, ConfigError: as `cut_model`.
    """
    path = _path_of(config)
    if path is not None:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # none yet, or a damaged one
            return StageCut.from_dict(json.loads(path.read_text()))
    with without_collection():
        from cdp_repro.predict.cutting import measure_cut  # here: torch takes seconds

        measured = measure_cut(config)
    return remember(config, measured)


def remember(config: RunConfig, measured: StageCut) -> StageCut:
    """Keep the measurements of `cut_model`, from a plan or a run, for later plans; return them.

    If no file can be written, nothing is kept and the next plan measures again.
    """
    numbers = measured.to_dict()
    path = _path_of(config)
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(numbers).encode())
    return StageCut.from_dict(numbers)


def _path_of(config: RunConfig) -> Path | None:
    """Return the file of a cut; None without a home directory, and for a cut that may differ another day."""
    if not follows_from_shapes(config.partition, config.model.name):
        return None
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = given if given.is_absolute() else Path.home() / ".cache"  # a relative path must be ignored
    except RuntimeError:
        return None
    return folder / "cdp-repro" / "cuts" / f"{_hash_of(config)}.json"


def _hash_of(config: RunConfig) -> str:
    return hashlib.sha256(json.dumps(_determining(config), sort_keys=True).encode()).hexdigest()[:32]


def _determining(config: RunConfig) -> Mapping[str, Any]:
    """Return everything that a cut depends on."""
    return {
        "model": asdict(config.model),
        "inputs": [config.task.is_text, *config.input_shape],
        "classes": config.dataset.classes,
        "micro_batch": config.micro_batch_shape,
        "slices": config.slices_of_a_sequence,
        "stages": config.stage_count,
        "sources": config.sources,
        "partition": config.partition,
        "precision": config.precision,
        "channels_last": config.channels_last,
        "code": code_hash(_CODE),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
