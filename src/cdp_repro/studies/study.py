"""A study: the runs of one table, in cells of one run per seed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cdp_repro.config import RunConfig
from cdp_repro.config.keys import settings_of
from cdp_repro.config.known import compose_known
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
        return shlex.join(["cdp-train", *self.arguments(seed)])

    @property
    def config(self) -> RunConfig:
        """The configuration of seed 0."""
        return compose_known(self.overrides)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted key, of seed 0."""
        return settings_of(self.config.to_dict())

    @cached_property
    def hash(self) -> str:
        """The hash that its runs have as `Row.cell`."""
        return cell_hash(self.settings)


@dataclass(frozen=True)
class Study:
    """The runs of one table, and its title."""

    name: str
    kind: str
    """The part of the report it is for: `accuracy`, `tuning`, `delay`, `delay-tuning`, `delay-finals`,
    `late-systems`, `memory`, `costs`, `systems`."""
    title: str
    cells: tuple[Cell, ...]
    reference: str | None = None
    """The study whose data parallelism this one is compared with, if it has none of its own."""
    varied: tuple[str, ...] = ()
    """Settings beyond the usual that tell its groups apart."""
    margin: float | None = None
    """The margin of a verdict of equivalence, in the unit of the differences; None if the study gives no verdict."""
    tuning: str | None = None
    """The study that chose the learning rates of this one, setting by setting."""
    passes_on: int = 1
    """How many learning rates of each setting a tuning passes on to the study after it."""
    chooses: bool = False
    """Whether the best setting of each mode goes on from it to fresh seeds."""

    @property
    def network(self) -> str:
        """The data set and the network, with which the title begins."""
        return self.title.partition(":")[0]

    @property
    def counts_divergence(self) -> bool:
        """Whether a run that diverges is a result: of its learning rate, or of its method."""
        return self.kind.startswith("delay")

    def runs(self) -> Iterator[tuple[Cell, int]]:
        """Yield every cell with every seed, seed by seed, so that the first runs make a table of few seeds."""
        seeds = sorted({seed for cell in self.cells for seed in cell.seeds})
        return ((cell, seed) for seed in seeds for cell in self.cells if seed in cell.seeds)
