"""Which runs the report's tables and figures need: studies, made of cells, made of one run a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

from omegaconf import OmegaConf

from cdp_repro.cli.compose import compose_config
from cdp_repro.config import BASELINES, RunConfig, settings_of
from cdp_repro.report.closed_forms import PLACEMENT_NAMES
from cdp_repro.report.costs import EXECUTED_WORKERS
from cdp_repro.report.rows import cell_hash
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS

PAPER_MODES = ("dp", "cdp_v1", "cdp_v2")


@dataclass(frozen=True)
class Cell:
    """Runs that differ in the seed only."""

    overrides: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)

    def arguments(self, seed: int) -> list[str]:
        """Return the overrides of one run."""
        return [*self.overrides, *([f"seed={seed}"] if seed else [])]

    def command(self, seed: int) -> str:
        """Return the command line of one run."""
        return " ".join(["cdp-train", *self.arguments(seed)])

    @property
    def config(self) -> RunConfig:
        """What Hydra would compose, of seed 0."""
        return _composed(self.overrides)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted key, of seed 0."""
        return settings_of(self.config.to_dict())

    @cached_property
    def hash(self) -> str:
        """As `Row.cell` of its runs."""
        return cell_hash(self.settings)


@cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration; Hydra is asked only for the groups that bring other settings with them."""
    groups = tuple(text for text in overrides if text.partition("=")[0] in ("dataset", "model", "optim", "experiment"))
    others = [written for text in overrides if text not in groups for written in _by_name(text)]
    composed = OmegaConf.merge(OmegaConf.structured(RunConfig), _base(groups), OmegaConf.from_dotlist(others))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, RunConfig)
    return config


@cache
def _base(groups: tuple[str, ...]) -> dict[str, Any]:
    return compose_config(groups, check_device=False).to_dict()


def _by_name(override: str) -> list[str]:
    """Write out the choice of a group that sets a name and nothing else."""
    key, _, value = override.partition("=")
    if value.startswith("["):
        return [f"{key}.name=matrix", f"{key}.staleness={value}"]
    return [f"{key}.name={value}" if key in ("mode", "placement") else override]


@dataclass(frozen=True)
class Study:
    """The runs of one table, and what it is about."""

    name: str
    kind: str
    """`accuracy`, `tuning`, `memory` or `costs`: which part of the report it is for."""
    title: str
    cells: tuple[Cell, ...]
    reference: str | None = None
    """The study whose data parallelism this one is compared with, if it has none of its own."""
    varied: tuple[str, ...] = ()
    """Settings beyond the usual that tell its groups apart."""

    def runs(self) -> Iterator[tuple[Cell, int]]:
        """Yield every cell with every seed, seed by seed, so that a part of them makes a table of few seeds."""
        seeds = sorted({seed for cell in self.cells for seed in cell.seeds})
        return ((cell, seed) for seed in seeds for cell in self.cells if seed in cell.seeds)


def _cells(*swept: Sequence[str], seeds: Sequence[int] = (0,)) -> tuple[Cell, ...]:
    """Return a cell for every combination; a text may hold several overrides with blanks between."""
    return tuple(Cell(tuple(" ".join(chosen).split()), tuple(seeds)) for chosen in product(*swept))


def _modes(modes: Sequence[str] = PAPER_MODES) -> list[str]:
    return [f"mode={mode}" for mode in modes]


def _constant(delay: int, workers: int) -> str:
    row = f"[{','.join([str(delay)] * workers)}]"
    return f"mode=[{','.join([row] * workers)}]"


CIFAR10 = "dataset=cifar10 channels_last=true optim.lr={}"
TUNED_LR = 0.2
"""Of data parallelism, for all modes; by `accuracy.chosen_rate` from the study of tuning, as are the following."""
STALENESS_LR = {2: 0.1, 3: 0.025, 5: 0.025}
"""By delay: the learning rate that suits it."""

_NETWORKS = {"resnet18": 10, "resnet50": 18, "vit_b_16": 14}
"""The networks of the memory figures, with their number of blocks."""


def _memory() -> tuple[Cell, ...]:
    found: list[Cell] = []
    for model, blocks in _NETWORKS.items():
        for workers in (4, 8, blocks):
            size = (
                f"dataset=synthetic dataset.channels=3 dataset.image_size=224 dataset.classes=1000 model={model} "
                f"workers={workers} batch_size={workers} dataset.train_samples={3 * workers} dataset.test_samples=1 "
                "epochs=1 optim.lr=0.0001"
            )
            cuts = [f"partition={name}" for name in ("flops", "activations")] if workers < blocks else [""]
            orders = ["mode=dp", "mode=cdp_v2", "mode=cdp_v2 slot_order=backward_first"]
            found += _cells(orders, [size], cuts)
    return tuple(found)


def _costs() -> tuple[Cell, ...]:
    """All settings and the peers, on a network whose stages, but the last, cost the same."""
    found: list[Cell] = []
    for workers in EXECUTED_WORKERS:
        size = f"model=mlp model.depth={workers - 1} workers={workers} batch_size={12 * workers} epochs=1"
        found += _cells(_modes(), [size], [f"placement={name}" for name in PLACEMENT_NAMES])
        found += _cells(["mode=dp"], [size], ["placement=pipeline pipeline_schedule=gpipe"])
        found += _cells(["mode=dp collectives=true"], [size], [f"placement={name}" for name in COLLECTIVE_PLACEMENTS])
        found += _cells(["mode=accumulation"], [size])
        found += _cells(["mode=dp"], [size], [f"baseline={name}" for name in BASELINES])
    return tuple(found)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "cifar10",
            "accuracy",
            "CIFAR-10, resnet8: the paper's three modes",
            _cells(_modes(), [CIFAR10.format(TUNED_LR)], seeds=range(5)),
        ),
        Study(
            "cifar10-staleness",
            "accuracy",
            "CIFAR-10, resnet8: bounded staleness beyond one step, at the learning rate of dp and at its own",
            tuple(
                cell
                for delay, own in STALENESS_LR.items()
                for cell in _cells(
                    [_constant(delay, 4)], [CIFAR10.format(lr) for lr in (TUNED_LR, own)], seeds=range(2)
                )
            ),
            reference="cifar10",
            varied=("optim.lr",),
        ),
        Study(
            "digits",
            "accuracy",
            "Handwritten digits, resnet8",
            _cells(_modes(), seeds=range(10)),
        ),
        Study(
            "paper-cifar10-resnet18",
            "accuracy",
            "CIFAR-10, ResNet-18, the authors' set-up at full length",
            _cells(_modes(), ["experiment=paper/cifar10_resnet18"]),
        ),
        Study(
            "cifar10-tuning",
            "tuning",
            "CIFAR-10, resnet8, three epochs: the learning rate of data parallelism, and of longer delays",
            _cells(["mode=dp"], [f"{CIFAR10.format(lr)} epochs=3" for lr in (0.05, 0.1, 0.2, 0.4)])
            + _cells(
                [_constant(delay, 4) for delay in STALENESS_LR],
                [f"{CIFAR10.format(lr)} epochs=3" for lr in (0.0125, 0.025, 0.05, 0.1, 0.2)],
            ),
            varied=("optim.lr",),
        ),
        Study("memory", "memory", "Live activations over a training step, executed", _memory()),
        Study("costs", "costs", "What each setting costs, executed", _costs()),
    )
}
"""All studies that the project has committed rows of, by name."""
