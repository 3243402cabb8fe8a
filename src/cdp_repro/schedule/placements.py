"""Placements: the rank that computes a stage for a micro-batch, and the ranks that hold the state of a stage.

A placement says nothing else. The passes derive the messages, sums and updates, and their slots, from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import ClassVar

from cdp_repro.schedule.by_name import ByName, is_subclass_of
from cdp_repro.schedule.timelines.timeline import Timeline


@dataclass(frozen=True)
class Placement(ABC):
    """Maps compute and state to ranks (one rank is one process with one device).

    A subclass gives `holders`, and `rank_of` if micro-batches do not take turns on the holders.
    """

    timeline: Timeline
    name: ClassVar[str]
    is_sharded: ClassVar[bool] = False
    """Whether each holder of a stage has one shard of its state, so that all together hold one copy."""

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that hold or compute a stage."""
        stages, together = range(self.timeline.sizes.stages), range(self.timeline.sizes.lanes)
        computing = (self.rank_of(m, stage) for m in together for stage in stages)
        holding = (max(held[0], held[-1]) for held in map(self.holders, stages))
        return 1 + max(*holding, *computing)

    @abstractmethod
    def holders(self, stage: int) -> range:
        """Return the ranks that hold parameters, versions and optimizer state of `stage`."""

    def rank_of(self, micro_batch: int, stage: int) -> int:
        """Return the rank that computes `stage`, forward and backward, on `micro_batch`."""
        holders = self.holders(stage)
        return holders[micro_batch % len(holders)]

    @classmethod
    def for_timeline(cls, timeline: Timeline, collectives: bool) -> Placement:  # noqa: ARG003 - most placements have one form
        """Return the form of the placement for a timeline, with or without collectives."""
        return cls(timeline)


class SingleDevice(Placement):
    """Everything on rank 0, which runs the actions of a slot for all workers one after the other."""

    name = "single_device"

    def holders(self, stage: int) -> range:  # noqa: ARG002 - the same for all
        """Return rank 0."""
        return range(1)


class Replicated(Placement):
    """One rank per lane, with a full copy of the model: the usual placement of data parallelism."""

    name = "replicated"

    def holders(self, stage: int) -> range:  # noqa: ARG002 - every rank holds all stages
        """Return all ranks."""
        return range(self.timeline.sizes.lanes)


class Zero(Replicated):
    """One rank per lane; the state of each stage is on one of them, its owner (ZeRO stage 3, stage by stage)."""

    name = "zero"

    def holders(self, stage: int) -> range:
        """Return the owner of the stage; stages are spread evenly over the ranks."""
        owner = stage * self.timeline.sizes.lanes // self.timeline.sizes.stages
        return range(owner, owner + 1)

    def rank_of(self, micro_batch: int, stage: int) -> int:  # noqa: ARG002 - a worker computes all stages
        """Return the rank of the micro-batch's lane."""
        return self.timeline.lanes.lane_of(micro_batch)

    @classmethod
    def for_timeline(cls, timeline: Timeline, collectives: bool) -> Placement:
        """Return the form with shards for collectives of several ranks."""
        return ShardedZero(timeline) if collectives and timeline.sizes.lanes > 1 else cls(timeline)


class ParameterServer(Zero):
    """One rank per lane; the state of the stages is spread evenly over P more ranks, which compute no stage.

    Workers pull parameters and push gradients (Li et al. 2014). A server is `Zero`'s owner without a worker.
    """

    name = "parameter_server"

    def holders(self, stage: int) -> range:
        """Return the server of the stage."""
        sizes = self.timeline.sizes
        server = sizes.lanes + stage * sizes.servers // sizes.stages
        return range(server, server + 1)


class ShardedZero(Replicated):
    """One rank per lane, each with a shard of every stage: ZeRO stage 3 as libraries implement it (FSDP).

    All ranks gather a stage to compute with it, so workers must compute the same stage at once.
    """

    name = "zero"
    is_sharded = True


class Pipeline(Placement):
    """S/D stages per rank: micro-batches move, parameters stay. There are R copies of the pipeline.

    The layout of the timeline says which of D places has a stage. `consecutive`: neighbouring stages share a place.
    `looped`: stage j is at j mod D, so a micro-batch goes round S/D times (Narayanan et al. 2021). `both_ways`: stage j
    is at j for even micro-batches and at D-1-j for odd ones, so stages j and D-1-j share two ranks (Li and Hoefler
    2021).
    """

    name = "pipeline"

    def holders(self, stage: int) -> range:
        """Return the R ranks of the stage, one for each replica; with two directions, one for each direction."""
        sizes, layout = self.timeline.sizes, self.timeline.layout
        if layout == "both_ways":
            low, high = sorted((stage, sizes.stages - 1 - stage))
            return range(low, high + 1, high - low)
        ranks = sizes.pipeline_ranks
        place = stage % ranks if layout == "looped" else stage * ranks // sizes.stages
        return range(place * sizes.replicas, (place + 1) * sizes.replicas)

    def rank_of(self, micro_batch: int, stage: int) -> int:
        """Return the rank of the micro-batch's replica or direction."""
        if self.timeline.layout == "both_ways":
            return self.timeline.sizes.stages - 1 - stage if micro_batch % 2 else stage
        return super().rank_of(micro_batch, stage)


class ModelParallel(Placement):
    """One stage per rank; micro-batches take turns on the ranks of a stage, as few as are free again in time.

    On the cyclic timeline, stage j keeps a micro-batch for 2(S-j) slots, from its forward to its backward, and one
    starts every 2c slots. So it needs ceil((S-j)/c) ranks, or N(N+1)/2 in all for N = S; data parallelism needs N a
    stage. With replicas these are times R.
    """

    name = "model_parallel"

    def holders(self, stage: int) -> range:
        """Return the ranks of the stage's group; the replicas of a turn are on neighbouring ranks."""
        return self._holders[stage]

    @cached_property
    def _holders(self) -> list[range]:
        sizes = self.timeline.sizes
        ends = accumulate(self._turns_alive(stage) * sizes.replicas for stage in range(sizes.stages))
        return [range(first, end) for first, end in pairwise((0, *ends))]

    def _turns_alive(self, stage: int) -> int:
        """Return the least n such that the forward of each turn is after the backward of the n-th before it."""
        timeline, turns = self.timeline, self.timeline.sizes.turns

        def is_free(i: int, later: int) -> bool:
            steps, other = divmod(i + later, turns)
            return steps * timeline.period + timeline.forward(other, stage) > timeline.backward_weights(i, stage)

        return next(n for n in count(1) if all(is_free(i, n) for i in range(turns)))


PLACEMENTS: ByName[type[Placement]] = ByName(
    "placements",
    {
        placement.name: placement
        for placement in (SingleDevice, Replicated, Zero, ModelParallel, Pipeline, ParameterServer)
    },
    is_subclass_of(Placement),
    "a subclass of Placement",
)


def add_placement(placement: type[Placement]) -> None:
    """Enter a placement under its name."""
    PLACEMENTS[placement.name] = placement
