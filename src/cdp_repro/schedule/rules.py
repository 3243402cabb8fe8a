"""Rules: the version of a stage's parameters that a micro-batch reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cdp_repro.schedule.actions import Op
from cdp_repro.schedule.sizes import Sizes


@dataclass(frozen=True)
class Rule(ABC):
    """Micro-batch i of training step t reads stage j at version max(0, t - staleness(i, j)), forward and backward.

    If a step has U updates instead of one, the version is max(0, tU + u - staleness(i, j)), where u of them precede the
    update that the micro-batch contributes to. A subclass gives `staleness`, and `backward_staleness` if the backward
    reads another version. As in timelines, i counts turns: all replicas read the same version.
    """

    sizes: Sizes

    @abstractmethod
    def staleness(self, i: int, j: int) -> int:
        """Return the staleness, in updates, of the version of stage j that micro-batch i reads."""

    def backward_staleness(self, i: int, j: int) -> int:
        """Return the staleness of the version that the backward reads: the same, unless nothing is stashed."""
        return self.matrix[i][j]

    @cached_property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """All values of the staleness: a row for each turn of a step, a column for each stage."""
        return tuple(tuple(self.staleness(i, j) for j in range(self.sizes.stages)) for i in range(self.sizes.turns))

    @cached_property
    def stashes(self) -> bool:
        """Whether every backward reads the version of its forward."""
        return all(self.backward_staleness(i, j) == d for i, row in enumerate(self.matrix) for j, d in enumerate(row))

    @cached_property
    def largest_by_stage(self) -> tuple[int, ...]:
        """The largest staleness on each stage, in updates."""
        return tuple(map(max, zip(*self.matrix, strict=True)))

    @cached_property
    def least(self) -> int:
        """The smallest staleness on any stage, in updates; 0 if some read is fresh."""
        return min(map(min, self.matrix))

    @cached_property
    def mean(self) -> float:
        """The mean staleness over micro-batches and stages, in updates."""
        return sum(map(sum, self.matrix)) / (self.sizes.turns * self.sizes.stages)

    @cached_property
    def longest(self) -> int:
        """The largest staleness, in training steps. After this many steps, all reads are as stale as the rule says."""
        return -(-max(self.largest_by_stage) // self.sizes.updates)

    def version(self, micro_batch: int, stage: int, op: Op = Op.FORWARD) -> int:
        """Return v(m, j), the version of `stage` that a forward or backward of micro-batch m reads; m includes
        replicas."""
        i = micro_batch % self.sizes.micro_batches // self.sizes.replicas
        staleness = self.matrix[i][stage] if op is Op.FORWARD else self.backward_staleness(i, stage)
        return max(0, micro_batch // self.sizes.summed - staleness)


class Fresh(Rule):
    """The version made by the training step before: synchronous training."""

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 0."""
        return 0


class UniformDelay(Rule):
    """The version one training step older, for all micro-batches and stages: `cdp_v1`; on a pipeline PipeDream-2BW."""

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 1."""
        return 1


class Freshest(Rule):
    """The newest version that the cyclic timeline can serve: `cdp_v2`; with one micro-batch per step, PipeDream.

    The last backward of stage j in training step t is in slot 2c((t+1)M - 1) + 2S-1-j, and version t+1 exists from the
    next slot on. Micro-batch m reads in slot 2cm + j, so it can have version v if 2c(vM - 1) + 2S - j <= 2cm + j, that
    is, v <= (c(m+1) + j - S) / (cM). With m = tM + i, the read is fresh, v = t, exactly if c(i+1) + j >= S; else it is
    one step late if M >= N. So the share of stale reads on stage j is (ceil((S-j)/c) - 1) / M. More micro-batches in a
    training step make it smaller, and the pipeline still never drains.
    """

    def staleness(self, i: int, j: int) -> int:
        """Return -floor((c(i+1) + j - S) / (cM))."""
        per_worker = self.sizes.stages // self.sizes.workers
        return -((per_worker * (i + 1) + j - self.sizes.stages) // (per_worker * self.sizes.turns))


class NoStashing(Freshest):
    """The newest version that the rank has, for the forward and again for the backward: AMPNet.

    The backward uses the inputs that the forward saved, and the newer parameters. On the cyclic timeline, the training
    step before is always complete on this stage by then, so a backward reads fresh.
    """

    def backward_staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 0."""
        return 0


class Clock(Rule):
    """The newest version on the servers when the worker pulls, by the virtual clock: `async`, or `ssp` with a bound.

    The version is the same on all stages: a push counts once all of it has arrived.
    """

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return the number of pushes by others between the micro-batch's pull and its own push."""
        return i - self.sizes.round.turns[i].seen


@dataclass(frozen=True)
class Matrix(Rule):
    """Any staleness, given as a matrix, to study bounded staleness."""

    rows: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        """Raise ValueError if the shape of the matrix is wrong, or an entry is not an integer of 0 or more."""
        sizes, rows = self.sizes, self.rows
        shape = [len(row) if isinstance(row, Sequence) else "no list" for row in rows]
        if shape != [sizes.stages] * sizes.turns:
            raise ValueError(
                f"the staleness matrix needs {sizes.turns} rows (micro-batches) of {sizes.stages} entries (stages); "
                f"got {len(shape)} rows of {shape[:8]} entries; one that works: "
                f"{[[1] * sizes.stages] * sizes.turns if sizes.turns * sizes.stages <= 64 else 'all of them 1'}"
            )
        for i, row in enumerate(rows):
            for stage, entry in enumerate(row):
                if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
                    raise ValueError(
                        f"staleness of micro-batch {i} on stage {stage} is {entry!r}: "
                        "it must be an integer number of training steps, 0 or more"
                    )

    def staleness(self, i: int, j: int) -> int:
        """Return the entry of the matrix."""
        return self.rows[i][j]
