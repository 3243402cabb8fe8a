"""Update rules: a mode names a timeline and the staleness d(i, j) of every worker and stage."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

Staleness = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mode:
    """A timeline and its update rule.

    Worker i of training step t reads stage j at version max(0, t - staleness[i][j]) in its forward and in its
    backward; the update is theta[t+1, j] = optimizer(theta[t, j], mean over i of worker i's gradients).
    """

    name: str
    timeline: str
    """`simultaneous` (all workers run the same stage in the same slot), `sequential` (one worker after the other),
    `cyclic` (uniformly delayed), or `gpipe` or `one_f_one_b` (one stage after the other, with a flush at the end of
    each training step)."""
    staleness: Staleness
    """Row i is worker i, column j is stage j; with replicas, each worker has one row for each of them."""
    replicas: int = 1
    """R: micro-batches that a worker's share is split into, which run in the same slots on R devices."""

    @cached_property
    def micro_batches(self) -> int:
        """M = N * R: micro-batches in a training step."""
        return len(self.staleness)

    @cached_property
    def workers(self) -> int:
        """N."""
        return self.micro_batches // self.replicas

    @cached_property
    def stages(self) -> int:
        """S."""
        return len(self.staleness[0])

    @property
    def slots_per_step(self) -> int:
        """Slots from the start of one training step to that of the next."""
        if self.timeline in ("simultaneous", "cyclic"):
            return 2 * self.stages
        if self.timeline == "sequential":
            return 2 * self.stages * self.workers
        return 2 * (self.workers + self.stages - 1)

    def version_read(self, micro_batch: int, stage: int) -> int:
        """Return the version of `stage` that the rule asks for on a micro-batch."""
        step, row = divmod(micro_batch, self.micro_batches)
        return max(0, step - self.staleness[row][stage])

    def version_made(self, micro_batch: int) -> int:
        """Return the version that is made from the gradients of the micro-batch's training step."""
        return micro_batch // self.micro_batches + 1

    def oldest(self, stage: int) -> int:
        """Return the largest staleness that any worker has on `stage`, in training steps."""
        return self._oldest[stage]

    @cached_property
    def _oldest(self) -> tuple[int, ...]:
        return tuple(map(max, zip(*self.staleness, strict=True)))


def _constant(delay: int) -> Callable[[int, int], Staleness]:
    return lambda workers, stages: ((delay,) * stages,) * workers


def _freshest_cyclic(workers: int, stages: int) -> Staleness:
    """CDP-v2: fresh wherever the cyclic timeline can serve it, i.e. where c*i + j >= c*(N-1), with S = c*N."""
    per_worker = stages // workers
    return tuple(
        tuple(0 if per_worker * worker + stage >= per_worker * (workers - 1) else 1 for stage in range(stages))
        for worker in range(workers)
    )


MODES: dict[str, tuple[str, Callable[[int, int], Staleness]]] = {
    "dp": ("simultaneous", _constant(0)),
    "cdp_v1": ("cyclic", _constant(1)),
    "cdp_v2": ("cyclic", _freshest_cyclic),
    "accumulation": ("sequential", _constant(0)),
}
"""All modes, the paper's first: name -> (timeline, rule)."""


def resolve_mode(mode: str | Sequence[Sequence[int]], workers: int, stages: int, replicas: int = 1) -> Mode:
    """Return the mode that a name or a staleness matrix stands for.

    A matrix has one row a worker and one column a stage, runs on the cyclic timeline, and may hold any
    non-negative integers that this timeline can serve (validation decides which).

    Raises:
        ValueError: an unknown name, or a matrix of another shape or with entries that are not integers >= 0.
    """
    name = mode if isinstance(mode, str) else "matrix"
    if isinstance(mode, str):
        if mode not in MODES:
            nearest = difflib.get_close_matches(mode, MODES, n=1, cutoff=0.3)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown mode {mode!r}: choose {', '.join(MODES)} or give a staleness matrix{hint}")
        timeline, rule = MODES[mode]
        staleness = rule(workers, stages)
    else:
        timeline, staleness = "cyclic", _checked_matrix(mode, workers, stages)
    return Mode(name, timeline, tuple(row for row in staleness for _ in range(replicas)), replicas)


def _checked_matrix(matrix: Sequence[Sequence[int]], workers: int, stages: int) -> Staleness:
    shape = [len(row) if isinstance(row, Sequence) else "no list" for row in matrix]
    if shape != [stages] * workers:
        raise ValueError(
            f"the staleness matrix needs {workers} rows (workers) of {stages} entries (stages); "
            f"got {len(shape)} rows of {shape} entries; one that works: {[[1] * stages] * workers}"
        )
    for worker, row in enumerate(matrix):
        for stage, delay in enumerate(row):
            if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
                raise ValueError(
                    f"staleness of worker {worker} on stage {stage} is {delay!r}: "
                    "it must be an integer number of training steps, 0 or more"
                )
    return tuple(tuple(row) for row in matrix)
