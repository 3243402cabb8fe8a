"""The five numbers of a schedule, S, N, k, R and D, and the other sizes of some systems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from cdp_repro.schedule.branches import Sources, chain, check_sources, readers
from cdp_repro.schedule.virtual_clock import Round, Ticks, ticks_of

MOST_TICKS = 60
"""The most ticks of the slowest worker's micro-batch without jitter: the slots of a round grow with them."""
MOST_MESSAGE_TIME = 10


@dataclass(frozen=True)
class Sizes:
    """The sizes of a `Spec`, with defaults filled in; fields of the same name mean the same.

    `micro_batches`, `ranks` and `sources` of the spec are `chosen_turns`, `pipeline_ranks` and `chosen_sources` here:
    the number of all micro-batches, that of all ranks, and the sources of a chain, too, have the plain names.

    Five numbers, not one, and more for some systems; each timeline says how it ties them together. Micro-batch
    m = tM + i is the i-th of the M of training step t. With R replicas, a worker computes R micro-batches at once; they
    have consecutive numbers.
    """

    stages: int
    workers: int
    accumulate: int = 1
    replicas: int = 1
    pipeline_ranks: int = 1
    """D: `ranks` of the spec."""
    servers: int = 1
    updates_each: bool = False
    """Whether each micro-batch is a training step of its own: M = R, with N training steps under way."""
    has_own_clocks: bool = False
    """Whether workers run on clocks of their own, and each micro-batch is an update: a training step is a `round`."""
    speeds: tuple[int, ...] = ()
    """() if all are equal."""
    jitter: int | None = None
    message_time: float = 0
    slack: int | None = None
    """None sets no bound."""
    slices: int = 1
    chosen_turns: int | None = None
    """`micro_batches` of the spec. If not a multiple of N, a turn has another worker in the next training step."""
    chosen_sources: Sources = ()
    """() for a chain."""

    @cached_property
    def sources(self) -> Sources:
        """For each stage, the stages whose outputs it reads; a stage without sources reads the data."""
        return self.chosen_sources or chain(self.stages)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """For each stage, the stage that reads its output; -1 for the last."""
        return readers(self.sources)

    @cached_property
    def branch_of(self) -> tuple[int, ...]:
        """For each stage, the first stage of its branch, which reads the data; a join continues its first source's."""
        found: list[int] = []
        for stage, read in enumerate(self.sources):
            found.append(found[read[0]] if read else stage)
        return tuple(found)

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """For each rank of a pipeline, how many ranks a micro-batch passes after it. Branches run side by side."""
        chunk, found = self.stages // self.pipeline_ranks, [0] * self.pipeline_ranks
        for rank in range(self.pipeline_ranks - 1)[::-1]:
            found[rank] = 1 + found[self.readers[(rank + 1) * chunk - 1] // chunk]
        return tuple(found)

    @cached_property
    def lanes(self) -> int:
        """N R L: micro-batches under way at once, each in a row of pictures; `Lanes` gives the lane of each."""
        return self.workers * self.replicas * self.slices

    @cached_property
    def turns(self) -> int:
        """M / R: micro-batches of a training step, without replicas. Timelines and rules count turns."""
        if self.has_own_clocks:
            return len(self.round.turns)
        if self.updates_each:
            return 1
        return (self.chosen_turns or self.workers * self.accumulate) * self.slices

    @property
    def turns_are_set_by(self) -> str:
        """The setting that gives the number of turns, for advice."""
        return "workers" if self.chosen_turns is None else "micro_batches"

    @cached_property
    def ticks(self) -> Ticks:
        """The ticks of each worker's micro-batches, in turn, and of a message."""
        return ticks_of(self.speeds or (1,) * self.workers, self.jitter, self.message_time)

    @cached_property
    def round(self) -> Round:
        """The round that workers on clocks of their own repeat."""
        return Round.for_workers(self.ticks, self.slack)

    @cached_property
    def updates(self) -> int:
        """U: updates of a training step, each with M/U micro-batches. Versions count updates."""
        return self.turns if self.has_own_clocks else 1

    @cached_property
    def summed(self) -> int:
        """M / U: micro-batches whose gradients are summed for one update."""
        return self.micro_batches // self.updates

    @cached_property
    def gradient_weight(self) -> float:
        """Weight of a micro-batch's gradient in an update: 1/M for the mean, or 1/N for a push."""
        return 1 / (self.workers if self.has_own_clocks else self.micro_batches)

    @cached_property
    def micro_batches(self) -> int:
        """M: micro-batches of a training step, replicas counted; k N R L unless chosen or given by the mode."""
        return self.turns * self.replicas

    @cached_property
    def sample_parts(self) -> int:
        """M / L: parts into which a mini-batch is cut along its samples."""
        return self.micro_batches // self.slices

    def place(self, micro_batch: int) -> tuple[int, int]:
        """Return the part of the mini-batch's samples that a micro-batch has, and the slice of their tokens.

        Slices count from the first tokens. Micro-batches are numbered in the order of their backwards, in which
        gradients are added. Backwards begin with the last tokens. L = 3, R = 1:

            micro-batch   0  1  2  3  4  5
            samples       0  0  0  1  1  1
            slice         2  1  0  2  1  0
        """
        turn, replica = divmod(micro_batch % self.micro_batches, self.replicas)
        part, later = divmod(turn, self.slices)
        return part * self.replicas + replica, self.slices - 1 - later

    def with_samples(self, part: int) -> int:
        """Return a micro-batch of step 0 with this part of the samples; all that have it are on the same ranks."""
        turn, replica = divmod(part, self.replicas)
        return turn * self.replicas * self.slices + replica

    def tokens_before(self, micro_batch: int) -> int | None:
        """Return the micro-batch with the tokens just before those of this one; None if this one has the first."""
        return micro_batch + self.replicas if self.place(micro_batch)[1] else None

    def tokens_after(self, micro_batch: int) -> int | None:
        """Return the micro-batch with the tokens just after those of this one; None if this one has the last."""
        return micro_batch - self.replicas if self.place(micro_batch)[1] < self.slices - 1 else None

    @cached_property
    def statistics(self) -> int:
        """Number of sets of BatchNorm's running statistics; a micro-batch has the set of its lane modulo this number.

        A set belongs to the same places in every training step, so the number divides M: one per lane if M = k N R L.
        Workers on clocks of their own have one set each, whatever the number of their pushes.
        """
        return self.lanes if self.has_own_clocks else math.gcd(self.lanes, self.micro_batches)

    def check(self, is_served: Callable[[Sizes], bool] = lambda _: True) -> None:
        """Raise ValueError, with a value that works, unless the sizes are in range and fit together, as D divides S.

        `is_served` tells whether sizes are those of some timeline: no other D is named.
        """
        for name in ("stages", "workers", "accumulate", "replicas", "slices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.pipeline_ranks < 1 or self.stages % self.pipeline_ranks:
            divisors = (d for d in range(1, self.stages + 1) if self.stages % d == 0)
            served = [str(d) for d in divisors if is_served(replace(self, pipeline_ranks=d))]
            works = f"use ranks={', '.join(served)}" if served else "no number of ranks fits the other sizes"
            raise ValueError(f"ranks={self.pipeline_ranks} does not divide stages={self.stages}: {works}")
        if not 1 <= self.servers <= self.stages:
            raise ValueError(f"servers={self.servers} for stages={self.stages}: use servers=1 to {self.stages}")
        if self.chosen_sources:
            check_sources(self.chosen_sources, self.stages)
        self._check_speeds()

    def _check_speeds(self) -> None:
        if self.speeds and len(self.speeds) != self.workers:
            works = [*self.speeds, *[1] * self.workers][: self.workers]
            raise ValueError(
                f"speeds={[*self.speeds]} are of {len(self.speeds)} workers, workers={self.workers}: give one each, "
                f"such as speeds={works}"
            )
        if any(type(speed) is not int or speed < 1 for speed in self.speeds) or math.lcm(*self.speeds) > MOST_TICKS:
            raise ValueError(
                f"speeds={[*self.speeds]}: use integers from 1 whose least common multiple is at most {MOST_TICKS}, "
                f"such as speeds={[1] * (self.workers - 1) + [2]}"
            )
        if self.message_time:
            self._check_message_time()
        if self.slack is not None and self.slack < 0:
            raise ValueError(f"slack={self.slack}: use slack=0 (all wait for the slowest worker) or more")
        if (self.speeds or self.has_own_clocks) and self.replicas > 1:
            raise ValueError(f"replicas={self.replicas}: workers with speeds of their own have none; use replicas=1")
        if self.has_own_clocks:
            _ = self.round  # raises if the order of pushes repeats too late

    def _check_message_time(self) -> None:
        even = replace(self, jitter=None)
        if not 0 <= self.message_time <= MOST_MESSAGE_TIME or max(map(max, even.ticks.durations)) > MOST_TICKS:
            raise ValueError(
                f"message_time={self.message_time}: use a number from 0 to {MOST_MESSAGE_TIME} with which "
                f"micro-batches and messages are a few ticks of one clock, at most {MOST_TICKS} for a micro-batch, "
                "such as message_time=1"
            )


def check_divisible(batch_size: int, **factors: int) -> None:
    """Raise ValueError, with the nearest batch sizes that work, unless the mini-batch can be cut into equal parts.

    The number of parts is the product of `factors`, whose names are those of their settings, such as `workers`.
    """
    micro_batches = math.prod(factors.values())
    for name, number in factors.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if batch_size % micro_batches:
        below = batch_size // micro_batches * micro_batches
        works = " or ".join(f"batch_size={size}" for size in (below, below + micro_batches) if size > 0)
        parts = " x ".join(f"{name}={number}" for name, number in factors.items() if number > 1 or len(factors) == 1)
        raise ValueError(f"batch_size={batch_size} is not divisible by {parts}: use {works}")
