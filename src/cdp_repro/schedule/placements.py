"""Placements: which rank computes a stage for a micro-batch, and which ranks hold the state of a stage.

That is all that a placement says. The passes derive from it what is sent, summed and updated, and when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from cdp_repro.schedule.by_name import ByName
from cdp_repro.schedule.timelines.timeline import Timeline


@dataclass(frozen=True)
class Placement(ABC):
    """Maps compute and state to ranks (one rank is one process with one device).

    A subclass gives `ranks` and `holders`, and `rank_of` where micro-batches do not take turns on the holders.
    """

    timeline: Timeline
    name: ClassVar[str]
    is_sharded: ClassVar[bool] = False
    """Whether each holder of a stage has a part of its state, and all together hold it once."""

    @cached_property
    def ranks(self) -> int:
        """Number of ranks: all that hold a stage or compute one."""
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
    def of(cls, timeline: Timeline, collectives: bool) -> Placement:  # noqa: ARG003 - most have one form
        """Return the placement in the form that suits a timeline, and collectives if it is run by them."""
        return cls(timeline)


class SingleDevice(Placement):
    """Everything on rank 0, which computes for all workers in turn: the actions of a slot one after the other."""

    name = "single_device"

    def holders(self, stage: int) -> range:  # noqa: ARG002 - the same for all
        """Return rank 0."""
        return range(1)


class Replicated(Placement):
    """A worker a rank, with a full replica of the model: what data parallelism does on N devices."""

    name = "replicated"

    def holders(self, stage: int) -> range:  # noqa: ARG002 - every rank holds all stages
        """Return all ranks."""
        return range(self.timeline.sizes.lanes)


class Zero(Replicated):
    """A worker a rank, and the state of each stage on one of them, its owner (ZeRO stage 3, stage by stage)."""

    name = "zero"

    def holders(self, stage: int) -> range:
        """Return the one owner of the stage; stages are spread evenly over the ranks."""
        owner = stage * self.timeline.sizes.lanes // self.timeline.sizes.stages
        return range(owner, owner + 1)

    def rank_of(self, micro_batch: int, stage: int) -> int:  # noqa: ARG002 - a worker computes all stages
        """Return the worker's rank."""
        return self.timeline.lanes.of(micro_batch)

    @classmethod
    def of(cls, timeline: Timeline, collectives: bool) -> Placement:
        """Return the one with shards for collectives of several ranks."""
        return ShardedZero(timeline) if collectives and timeline.sizes.lanes > 1 else cls(timeline)


class ParameterServer(Zero):
    """A worker a rank, and the state of the stages spread evenly over P ranks more, which compute none of them.

    Workers pull parameters and push gradients (Li et al. 2014). A server is `Zero`'s owner without a worker.
    """

    name = "parameter_server"

    def holders(self, stage: int) -> range:
        """Return the one server of the stage."""
        sizes = self.timeline.sizes
        server = sizes.lanes + stage * sizes.servers // sizes.stages
        return range(server, server + 1)


class ShardedZero(Replicated):
    """A worker a rank, and an equal part of the state of every stage on each: ZeRO stage 3 as libraries do it (FSDP).

    All ranks gather a stage to compute with it, so that it suits workers that compute the same stage at once.
    """

    name = "zero"
    is_sharded = True


class Pipeline(Placement):
    """S/D stages a rank: micro-batches move, parameters stay. R copies of the pipeline.

    The timeline says which of D places a stage has: consecutive stages share one, or stage j is at j mod D, so that a
    micro-batch goes round S/D times (Narayanan et al. 2021), or at place j for even micro-batches and at D-1-j for odd
    ones, so that stages j and D-1-j share two ranks (Li and Hoefler 2021).
    """

    name = "pipeline"

    def holders(self, stage: int) -> range:
        """Return the R ranks of the stage, one for each replica; of two directions one for each."""
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
    """A stage a rank, on as many ranks as the stage has micro-batches alive at once.

    On the cyclic timeline stage j has a micro-batch for 2(S-j) slots, from its forward to its backward, and one starts
    every 2c slots: ceil((S-j)/c) ranks, or N(N+1)/2 in all for N = S. Other timelines need N each.
    """

    name = "model_parallel"

    def holders(self, stage: int) -> range:
        """Return the ranks of the stage's group, those of a micro-batch's replicas next to each other."""
        return self._holders[stage]

    @cached_property
    def _holders(self) -> list[range]:
        sizes = self.timeline.sizes
        ends = accumulate(self._alive(stage) * sizes.replicas for stage in range(sizes.stages))
        return [range(first, end) for first, end in pairwise((0, *ends))]

    def _alive(self, stage: int) -> int:
        sizes = self.timeline.sizes
        if self.timeline.name != "cyclic":
            return sizes.workers
        return -(-(sizes.stages - stage) // (sizes.stages // sizes.workers))


PLACEMENTS: ByName[type[Placement]] = ByName(
    "placements",
    {
        placement.name: placement
        for placement in (SingleDevice, Replicated, Zero, ModelParallel, Pipeline, ParameterServer)
    },
)
