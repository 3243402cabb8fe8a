"""Placements: where each micro-batch computes each stage, and who owns the state of a stage.

That is all that a placement says. The passes derive from it what is sent, summed, updated and freed, and when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from math import lcm
from typing import ClassVar

from cdp_repro.schedule.actions import Action, Op, Payload
from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.rules import Mode


@dataclass(frozen=True)
class Placement(ABC):
    """Maps compute and state of a schedule to ranks (one rank is one process with one device).

    Micro-batches take turns on the holders of a stage. To add a placement: say in a subclass how many ranks it has and
    which of them hold a stage, and enter it in `PLACEMENTS`.
    """

    mode: Mode
    name: ClassVar[str]
    is_sharded: ClassVar[bool] = False
    """Whether the holders of a stage have a part of its state each, not all of it."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def holders(self, stage: int) -> range:
        """Return the ranks that hold the parameters, versions and optimizer state of `stage`."""

    def reads_from(self, micro_batch: int, stage: int) -> int:
        """Return the rank whose copy of the parameters of `stage` the micro-batch reads."""
        first, number = self._turns[stage]
        return first + micro_batch % number

    def next_reader(self, rank: int, stage: int, micro_batch: int) -> int:
        """Return the first micro-batch from `micro_batch` on that reads `stage` from its holder `rank`."""
        first, number = self._turns[stage]
        return micro_batch + (rank - first - micro_batch) % number

    @cached_property
    def _turns(self) -> tuple[tuple[int, int], ...]:
        """The first of the holders of each stage, and their number."""
        holders = map(self.holders, range(self.mode.stages))
        return tuple((ranks.start, len(ranks)) for ranks in holders)

    def rank_of(self, micro_batch: int, stage: int) -> int:
        """Return the rank that computes `stage`, forward and backward, on `micro_batch`.

        That is the holder that it reads from, unless the stage has one holder, which lends its parameters out to other
        ranks and takes their gradients in.
        """
        return self.reads_from(micro_batch, stage)

    def copies(self, stage: int) -> int:
        """Return how many ranks hold all of the stage, each with updates of its own."""
        return 1 if self.is_sharded else self._turns[stage][1]

    def is_shared(self, stage: int) -> bool:
        """Whether several ranks hold all of the stage."""
        return self.copies(stage) > 1

    def borrows(self, rank: int, stage: int) -> bool:
        """Whether `rank` computes the stage with parameters that are brought to it: it does not hold them all."""
        return stage in self.lent and (self.is_sharded or rank not in self.holders(stage))

    def share(self, rank: int, size: int) -> int:
        """Return how many of `size` bytes of a stage one of its holders has: all, or those of its shard.

        Parameters of several types are cut by type, which may move a few bytes from rank to rank.
        """
        return len(part_of(size, rank + 1, self.ranks)) if self.is_sharded else size

    def live_bytes(self, rank: int, versions: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the bytes of so many `versions` of each stage on `rank`, of stages that have `sizes`."""
        return sum(number * self.share(rank, size) for number, size in zip(versions, sizes, strict=True))

    def held(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes that each rank holds of stages that have `sizes`."""
        sums = [0] * self.ranks
        for stage, size in enumerate(sizes):
            for rank in self.holders(stage):
                sums[rank] += self.share(rank, size)
        return sums

    @cached_property
    def lent(self) -> frozenset[int]:
        """The stages whose parameters are brought to ranks that compute with them and do not hold them all."""
        if self.is_sharded:
            return frozenset(range(self.mode.stages))
        micro_batches = range(self.mode.micro_batches)
        return frozenset(
            stage
            for stage in range(self.mode.stages)
            if any(self.rank_of(micro_batch, stage) not in self.holders(stage) for micro_batch in micro_batches)
        )

    def completes_sum(self, action: Action) -> bool:
        """Whether `action` adds the last of a training step's gradients to the sum of its stage."""
        if action.micro_batch is None:
            return False
        stage, last = action.stage, self.mode.micro_batches - 1
        missing = last - action.micro_batch % self.mode.micro_batches
        if missing > 1:
            return False
        if action.op is Op.COLLECTIVE:
            return missing == 0 and action.payload is Payload.TOTAL
        if action.op is Op.ADD:
            return missing == 0 or stage not in self.lent
        is_last = action.op is Op.BACKWARD and missing == 0 and stage not in self.lent
        return is_last and (last == 0 or self.rank_of(action.micro_batch - 1, stage) == action.rank)

    @cached_property
    def only_exchanges(self) -> bool:
        """Whether exchanges are all that ranks send: there are two, each with a micro-batch for all stages."""
        if self.mode.micro_batches != 2 or self.ranks != 2 or self.lent:
            return False
        return all(len({self.rank_of(m, stage) for stage in range(self.mode.stages)}) == 1 for m in range(2))

    def is_exchanged(self, micro_batch: int, stage: int) -> bool:
        """Whether the gradients of the last micro-batch of a training step, or the sum up to the one before, are sent
        by one of two holders of the stage to the other and stay: each adds what the other has, and has the whole sum.
        """
        missing = self.mode.micro_batches - 1 - micro_batch % self.mode.micro_batches
        return missing <= 1 < self.mode.micro_batches and self.copies(stage) == 2

    def versions_kept(self, rank: int, stage: int, step: int) -> range:
        """Return the versions of `stage` that `rank` holds after `step` whole training steps: oldest read to newest.

        Empty on ranks that do not hold the stage.
        """
        if rank not in self.holders(stage):
            return range(0)
        return range(min(step, self.oldest_read_after(rank, stage, step * self.mode.micro_batches - 1)), step + 1)

    def keeper(self, stage: int, step: int) -> int:
        """Return a rank that keeps every version of `stage` that any rank keeps after `step` training steps."""
        return min(self.holders(stage), key=lambda rank: self.versions_kept(rank, stage, step).start)

    def in_order_of_need(self, stage: int, version: int) -> tuple[int, ...]:
        """Return the holders of `stage` in the order in which they first read `version` >= 1, or a later one."""
        first = version * self.mode.micro_batches
        key = stage, first % self.period(stage)
        if key not in self._orders:
            readers = (
                self.reads_from(micro_batch, stage)
                for micro_batch in count(first)
                if self.mode.version_read(micro_batch, stage) >= version
            )
            self._orders[key] = tuple(_first_distinct(readers, len(self.holders(stage))))
        return self._orders[key]

    def oldest_read_after(self, rank: int, stage: int, micro_batch: int) -> int:
        """Return the oldest version that any micro-batch after `micro_batch` reads from `rank`'s copy of `stage`."""
        step = micro_batch // self.mode.micro_batches
        key = rank, stage, micro_batch % self.period(stage)
        if key not in self._delays:
            self._delays[key] = self._delay_after(rank, stage, micro_batch)
        return max(0, step - self._delays[key])

    def period(self, stage: int) -> int:
        """Return after how many micro-batches both the workers and the ranks of `stage` repeat."""
        return lcm(self.mode.micro_batches, self._turns[stage][1])

    @cached_property
    def _orders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _delays(self) -> dict[tuple[int, int, int], int]:
        return {}

    def _delay_after(self, rank: int, stage: int, micro_batch: int) -> int:
        """Return by how many steps the oldest later read lies behind the step of `micro_batch`."""
        micro_batches, latest = self.mode.micro_batches, self.mode.oldest(stage)
        step = micro_batch // micro_batches
        delay = None
        for later in count(self.next_reader(rank, stage, micro_batch + 1), self._turns[stage][1]):
            ahead = later // micro_batches - step
            if delay is not None and latest - ahead <= delay:  # nothing later can be older
                return delay
            behind = self.mode.staleness[later % micro_batches][stage] - ahead
            delay = behind if delay is None else max(delay, behind)
        raise AssertionError("unreachable: `count` has no end")


def _first_distinct(values: Iterable[int], number: int) -> dict[int, None]:
    """Return so many different values, in the order in which they come."""
    found: dict[int, None] = {}
    for value in values:
        found[value] = None
        if len(found) == number:
            break
    return found


class SingleDevice(Placement):
    """Everything on rank 0: one copy of each stage, in as many versions as the rule needs."""

    name = "single_device"

    @property
    def ranks(self) -> int:
        """1."""
        return 1

    def holders(self, stage: int) -> range:  # noqa: ARG002 - the same for all
        """Return rank 0."""
        return range(1)


class Replicated(Placement):
    """A worker a rank, with a full replica of the model: what data parallelism does on N devices."""

    name = "replicated"

    @property
    def ranks(self) -> int:
        """N * R."""
        return self.mode.micro_batches

    def holders(self, stage: int) -> range:  # noqa: ARG002 - every rank holds all stages
        """Return all ranks."""
        return range(self.ranks)


class Zero(Replicated):
    """A worker a rank, and the state of each stage on one of them, its owner (ZeRO stage 3, stage by stage)."""

    name = "zero"

    def rank_of(self, micro_batch: int, stage: int) -> int:  # noqa: ARG002 - a worker computes all stages
        """Return the worker's rank."""
        return micro_batch % self.mode.micro_batches

    def holders(self, stage: int) -> range:
        """Return the one owner of the stage; stages are spread evenly over the ranks."""
        owner = stage * self.ranks // self.mode.stages
        return range(owner, owner + 1)


class ShardedZero(Replicated):
    """A worker a rank, and an equal part of the state of every stage on each: ZeRO stage 3 as libraries do it (FSDP).

    All ranks gather a stage to compute with it, so that it suits workers that compute the same stage at once.
    """

    name = "zero"
    is_sharded = True


class Pipeline(Placement):
    """S/N consecutive stages a rank: micro-batches move, parameters stay. R copies of the pipeline."""

    name = "pipeline"

    @property
    def ranks(self) -> int:
        """N * R."""
        return self.mode.micro_batches

    def holders(self, stage: int) -> range:
        """Return the R ranks of the stage, one for each replica of the pipeline."""
        first = stage * self.mode.workers // self.mode.stages * self.mode.replicas
        return range(first, first + self.mode.replicas)


class ModelParallel(Placement):
    """A stage a rank, on as many ranks as the stage has micro-batches alive at once.

    A micro-batch of the cyclic timeline keeps stage j of S = cN from its forward to its backward, 2(S-j) slots, and
    one starts every 2c slots: ceil((S-j)/c) ranks, or N(N+1)/2 in all for N = S. Other timelines need N each.
    """

    name = "model_parallel"

    @property
    def ranks(self) -> int:
        """N(N+1)/2 * R for the cyclic timeline with N = S, N * S * R for others."""
        return self.holders(self.mode.stages - 1).stop

    def holders(self, stage: int) -> range:
        """Return the ranks of the stage's group, those of a micro-batch's replicas next to each other."""
        return self._holders[stage]

    @cached_property
    def _holders(self) -> list[range]:
        ends = accumulate(self._group(stage) * self.mode.replicas for stage in range(self.mode.stages))
        return [range(first, end) for first, end in pairwise((0, *ends))]

    def _group(self, stage: int) -> int:
        if self.mode.timeline != "cyclic":
            return self.mode.workers
        per_worker = self.mode.stages // self.mode.workers
        return -(-(self.mode.stages - stage) // per_worker)


PLACEMENTS: dict[str, type[Placement]] = {
    placement.name: placement for placement in (SingleDevice, Replicated, Zero, ModelParallel, Pipeline)
}
"""All placements by name."""
