"""Trains a few steps on a placement and on one device, and compares every tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.numerics import parameter_dtype
from cdp_repro.config.program_file import program_of
from cdp_repro.engine.engine import Engine
from cdp_repro.launch import is_rank_0
from cdp_repro.launch.process_group import process_group
from cdp_repro.predict.cutting import CutModel, cut_alike
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.training.assembly import build_engine, load_data, reading_rule, same_cut, team_of
from cdp_repro.training.equivalence import Comparison
from cdp_repro.training.weights import start_from_file

LIBRARY_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}
"""By precision, the tolerance where a library adds gradients in an order of its own: difference over the largest value.
In bf16 the difference of a few steps comes near the values themselves, so that no tolerance would tell of a fault."""

DROPOUT = 0.1
"""Probability for a model that has dropout layers and is verified without a probability of its own."""


@dataclass(frozen=True)
class Outcome:
    """Losses and state after a few training steps."""

    losses: list[list[float]]
    """By step and micro-batch, as `StepResult` has them."""
    stages: list[dict[str, Tensor]]
    """By stage: every version, optimizer state and buffer, by its path; complete on rank 0, which compares."""
    cut: StageCut
    copies: list[str] = field(default_factory=list)
    """What ranks that hold the same stage have differently; complete on rank 0."""


def compare(config: RunConfig, steps: int) -> Comparison | None:
    """Train on the ranks of the placement, of which this process is one; rank 0 then trains alone and compares.

    Returns and raises what `equivalence.verify` says.
    """
    by_library = config.baseline is not None or config.collectives
    is_exact = not by_library and config.torch_device.type == "cpu"
    if not is_exact and config.precision not in LIBRARY_TOLERANCE:
        raise ConfigError([
            f"precision={config.precision} rounds so much that sums in another order end far apart: it compares only "
            f"our own sums on CPUs; use precision={' or '.join(LIBRARY_TOLERANCE)}"
        ])  # fmt: skip
    config = _with_dropout(config)
    found = _train_on_ranks(config, steps)
    if not is_rank_0():
        return None
    alone = copy.deepcopy(config)
    alone.placement.name, alone.baseline, alone.collectives = "single_device", None, False
    alone.ranks = alone.servers = alone.program = None
    expected = _train(alone, steps, cut_alike(alone, found.cut))
    return Comparison(
        losses=_difference(*(torch.tensor(each.losses, dtype=torch.float64) for each in (found, expected))),
        stages=[_largest(mine, theirs) for mine, theirs in zip(found.stages, expected.stages, strict=True)],
        ranks=config.processes,
        steps=steps,
        tolerance=0.0 if is_exact else LIBRARY_TOLERANCE[config.precision],
        dropout=config.model.dropout,
        copies=found.copies,
    )


def _with_dropout(config: RunConfig) -> RunConfig:
    """Return the configuration with dropout, if the model has it: its draws reveal ranks that are out of step."""
    found = copy.deepcopy(config)
    if found.model.dropout == 0 and found.baseline is None and not found.model.name.startswith("resnet"):
        found.model.dropout = DROPOUT
    return found


def _train_on_ranks(config: RunConfig, steps: int) -> Outcome:
    """Train on the ranks of the placement, of which this process is one."""
    with process_group(config.torch_device, config.processes, config.timeout_seconds):
        return _train(config, steps, same_cut(config, team_of(config)))


def _train(config: RunConfig, steps: int, cut: CutModel) -> Outcome:
    with _one_thread():
        dataset = load_data(config)
        start_from_file(config, cut.stages)
        program = program_of(config, cut.costs.gradient_bytes)
        engine = build_engine(config, cut, dataset.train_size, program)
        losses: list[list[float]] = []
        with engine.team.naming_stalled():
            for part in (range(steps // 2), range(steps // 2, steps)):
                batches = dataset.train_batches(
                    part,
                    batch_size=config.batch_size,
                    parts=config.sample_parts,
                    seed=config.seed,
                    device=config.torch_device,
                    dtype=parameter_dtype(config),
                    channels_last=config.channels_last,
                    is_read=reading_rule(program.schedule, engine),
                )
                losses += [result.losses for result in engine.run(batches)]
            stages = engine.state_dict().get("stages", [])
        tensors = [{path: tensor.cpu() for path, tensor in named_tensors(stage)} for stage in stages]
        return Outcome(losses, tensors, cut, engine.differing_copies() if isinstance(engine, Engine) else [])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: kernels cut their sums by threads, and a rank has fewer threads than one device."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of nested state with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for key, part in enumerate(value):
            yield from named_tensors(part, f"{path}/{key}")


def _largest(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    if mine.keys() != theirs.keys():
        raise RuntimeError(f"the states hold different tensors: {sorted(mine.keys() ^ theirs.keys())[:3]}")
    return max((_difference(mine[path], theirs[path]) for path in mine), default=0.0)


def _difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest value; infinite if a value is not finite."""
    if mine.numel() == 0:
        return 0.0
    kind = torch.complex128 if theirs.is_complex() else torch.float64
    difference = (mine.to(kind) - theirs.to(kind)).abs().max().item()
    scale = theirs.to(kind).abs().max().item() or 1.0
    return difference / scale if math.isfinite(difference / scale) else math.inf
