"""Rules: which version of a stage's parameters a micro-batch reads."""

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

    Where a step has U updates instead of one, that is max(0, tU + u - staleness(i, j)): u of them come before the one
    that the micro-batch is a part of. A subclass gives `staleness`, and `backward_staleness` if the backward reads
    another version. As for timelines, i counts the micro-batches of a step without replicas, all of which read the
    same.
    """

    sizes: Sizes

    @abstractmethod
    def staleness(self, i: int, j: int) -> int:
        """Return how many updates old the version is that micro-batch i reads of stage j."""

    def backward_staleness(self, i: int, j: int) -> int:
        """Return how old the version is that its backward reads: the same, unless nothing is stashed."""
        return self.matrix[i][j]

    @cached_property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """The staleness of all: a row for each of the micro-batches of a step, a column for each stage."""
        return tuple(tuple(self.staleness(i, j) for j in range(self.sizes.stages)) for i in range(self.sizes.turns))

    @cached_property
    def stashes(self) -> bool:
        """Whether every backward reads the version of its forward."""
        return all(
            self.backward_staleness(i, j) == delay for i, row in enumerate(self.matrix) for j, delay in enumerate(row)
        )

    @cached_property
    def oldest(self) -> tuple[int, ...]:
        """The largest staleness on each stage, in updates."""
        return tuple(map(max, zip(*self.matrix, strict=True)))

    @cached_property
    def mean(self) -> float:
        """The mean staleness over micro-batches and stages, in updates."""
        return sum(map(sum, self.matrix)) / (self.sizes.turns * self.sizes.stages)

    @cached_property
    def longest(self) -> int:
        """The largest staleness of all, in training steps: after so many, all reads are as stale as the rule says."""
        return -(-max(self.oldest) // self.sizes.updates)

    def version(self, micro_batch: int, stage: int, op: Op = Op.FORWARD) -> int:
        """Return v(m, j), the version of `stage` that a forward or backward of micro-batch m reads; m counts
        replicas, too."""
        i = micro_batch % self.sizes.micro_batches // self.sizes.replicas
        delay = self.matrix[i][stage] if op is Op.FORWARD else self.backward_staleness(i, stage)
        return max(0, micro_batch // self.sizes.summed - delay)


class Fresh(Rule):
    """The version that the step before has made: synchronous training."""

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 0."""
        return 0


class UniformDelay(Rule):
    """One training step late everywhere: `cdp_v1`; on a pipeline PipeDream-2BW."""

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 1."""
        return 1


class Freshest(Rule):
    """The newest version that the cyclic timeline can serve: `cdp_v2`; with a micro-batch a step, PipeDream.

    The last backward of stage j in training step t is in slot 2c((t+1)M - 1) + 2S-1-j, and version t+1 exists from the
    next slot on. Micro-batch m reads in slot 2cm + j, so that it can have version v if 2c(vM - 1) + 2S - j <= 2cm + j,
    which is v <= (c(m+1) + j - S) / (cM). With m = tM + i that is fresh, v = t, exactly if c(i+1) + j >= S, else one
    step late where M >= N. So the share of stale reads on stage j is (ceil((S-j)/c) - 1) / M: more micro-batches in a
    training step make it smaller, and the pipeline still never drains.
    """

    def staleness(self, i: int, j: int) -> int:
        """Return -floor((c(i+1) + j - S) / (cM))."""
        per_worker = self.sizes.stages // self.sizes.workers
        return -((per_worker * (i + 1) + j - self.sizes.stages) // (per_worker * self.sizes.turns))


class NoStashing(Freshest):
    """The newest version that the rank has, when the forward reads and again when the backward does: AMPNet.

    The backward takes the inputs that the forward has saved, and the newer parameters. On the cyclic timeline the
    training step before has always been completed on this stage by then, so that a backward reads fresh.
    """

    def backward_staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return 0."""
        return 0


class Clock(Rule):
    """The newest version on the servers when the worker pulls, by the virtual clock: `async`, and bounded as `ssp`.

    It is the same on all stages: a push counts when all of it has arrived.
    """

    def staleness(self, i: int, j: int) -> int:  # noqa: ARG002 - the same for all
        """Return the pushes of others between its pull and its own push."""
        return i - self.sizes.round.turns[i].seen


@dataclass(frozen=True)
class Matrix(Rule):
    """Any staleness: bounded staleness as a study."""

    rows: tuple[tuple[int, ...], ...] = ()

    def staleness(self, i: int, j: int) -> int:
        """Return the entry."""
        return self.rows[i][j]

    @classmethod
    def checked(cls, sizes: Sizes, rows: Sequence[Sequence[int]]) -> Matrix:
        """Return the rule of a matrix; ValueError if it has another shape or entries that are not integers >= 0."""
        shape = [len(row) if isinstance(row, Sequence) else "no list" for row in rows]
        if shape != [sizes.stages] * sizes.turns:
            raise ValueError(
                f"the staleness matrix needs {sizes.turns} rows (micro-batches) of {sizes.stages} entries (stages); "
                f"got {len(shape)} rows of {shape[:8]} entries; one that works: "
                f"{[[1] * sizes.stages] * sizes.turns if sizes.turns * sizes.stages <= 64 else 'all of them 1'}"
            )
        for i, row in enumerate(rows):
            for stage, delay in enumerate(row):
                if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
                    raise ValueError(
                        f"staleness of micro-batch {i} on stage {stage} is {delay!r}: "
                        "it must be an integer number of training steps, 0 or more"
                    )
        return cls(sizes, tuple(map(tuple, rows)))
