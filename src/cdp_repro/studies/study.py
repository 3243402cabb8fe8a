"""A study: the runs of one table, made of cells, made of one run a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from omegaconf import OmegaConf

from cdp_repro.config import RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.keys import settings_of
from cdp_repro.studies.rows import cell_hash


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
