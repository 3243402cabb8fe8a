"""A schedule: the choice of a timeline, a rule and a placement, for given sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Unpack

from cdp_repro.schedule.by_name import nearest
from cdp_repro.schedule.foreign import check_foreign
from cdp_repro.schedule.placements import PLACEMENTS, Placement
from cdp_repro.schedule.rules import Rule
from cdp_repro.schedule.schedule_spec import Choices, Spec, frozen, kinds
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines.timeline import Timeline
from cdp_repro.schedule.values import Value, buffers, parameters


@dataclass(frozen=True)
class Schedule:
    """A timeline, a rule and a placement that fit together. `Program` makes the actions of all ranks from it."""

    spec: Spec
    timeline: Timeline
    rule: Rule
    placement: Placement
    gradient_bytes: tuple[int, ...] = ()
    """Of each stage; () if unknown. They decide whether gradients are exchanged in parts."""

    @classmethod
    def build(
        cls,
        mode: str | Sequence[Sequence[int]],
        workers: int,
        stages: int | None = None,
        placement: str = "single_device",
        slot_order: str = "paper",
        *,
        gradient_bytes: Sequence[int] = (),
        **choices: Unpack[Choices],
    ) -> Schedule:
        """Return the schedule of a `Spec` with these values; `stages` defaults to `workers`.

        Raises:
            ValueError: as `from_spec`, or a choice has no such name.
        """
        others = {name: frozen(value) for name, value in choices.items()}
        for name in others.keys() - Choices.__annotations__.keys():
            known = kinds()
            raise ValueError(f"unknown choice {name}: choose {', '.join(known)}{nearest(name, known)}")
        number = workers if stages is None else stages
        return cls.from_spec(Spec(frozen(mode), workers, number, placement, slot_order, **others), gradient_bytes)

    @classmethod
    def from_spec(cls, spec: Spec, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the schedule that `spec` describes; `Program` checks whether its timeline can serve its rule.

        Raises:
            ValueError: values are out of range or do not fit together; names values that work.
        """
        for fault in spec.faults():
            raise ValueError(fault)
        timeline = spec.chosen_mode.timeline_class(spec.sizes)
        placement = PLACEMENTS[spec.placement].for_timeline(timeline, spec.collectives)
        if gradient_bytes and len(gradient_bytes) != spec.stages:
            raise ValueError(f"gradient_bytes has {len(gradient_bytes)} entries: give {spec.stages}, one a stage")
        if any(size < 0 for size in gradient_bytes):
            raise ValueError(f"gradient_bytes={[*gradient_bytes]}: give 0 or more, one number a stage")
        rule = spec.chosen_mode.rule(timeline.sizes)
        check_foreign(timeline, rule, placement)
        return cls(spec, timeline, rule, placement, tuple(gradient_bytes))

    def __str__(self) -> str:
        return str(self.spec)

    def data_parallel(self) -> Schedule:
        """Return data parallelism on the same sizes, placement and slot order, to compare this schedule with.

        Where a rank of a pipeline holds stages of several branches, which no flushing pipeline can order, it has a rank
        for each stage.
        """
        spec = self.spec.in_mode("dp")
        return Schedule.from_spec(replace(spec, ranks=self.stages) if spec.faults() else spec, self.gradient_bytes)

    @property
    def mode(self) -> str:
        """The name of the mode; `matrix` for a staleness matrix."""
        return self.spec.mode_name

    @property
    def sizes(self) -> Sizes:
        """The sizes of the timeline."""
        return self.timeline.sizes

    @cached_property
    def stages(self) -> int:
        """S."""
        return self.sizes.stages

    @cached_property
    def micro_batches(self) -> int:
        """M: micro-batches of a training step, replicas counted."""
        return self.sizes.micro_batches

    @cached_property
    def ranks(self) -> int:
        """Number of ranks (processes, devices)."""
        return self.placement.ranks

    def ahead(self, steps: int) -> tuple[int, int]:
        """Return the number of micro-batches and of updates in `steps` training steps."""
        return steps * self.micro_batches, steps * self.sizes.updates

    def statistics_of(self, micro_batch: int) -> int:
        """Return the number of a micro-batch's set of BatchNorm's running statistics."""
        return self.timeline.lanes.lane_of(micro_batch) % self.sizes.statistics

    def next_with(self, statistics: int, micro_batch: int) -> int:
        """Return the first micro-batch, from `micro_batch` on, with this set of running statistics."""
        if not self.timeline.lanes.order:
            return micro_batch + (statistics - micro_batch) % self.sizes.statistics
        return next(m for m in count(micro_batch) if self.statistics_of(m) == statistics)

    @property
    def slots_per_step(self) -> int:
        """Slots from the start of one training step to that of the next."""
        return self.timeline.period

    @property
    def kept_slots(self) -> int:
        """Slots for which a rank keeps a buffer that it sends, and within which the receive must stand: 2S."""
        return 2 * self.stages

    @property
    def max_lead(self) -> int:
        """The most training steps by which one rank can be ahead of another.

        A version needs the gradients of all ranks, so a rank at most `longest` + 1 steps ahead finds what it reads;
        3 more are room for steps that a rank has begun, or taken from its batches, before it waits.
        """
        return self.rule.longest + 4

    @cached_property
    def lent(self) -> frozenset[int]:
        """The stages whose parameters are brought to ranks that compute with them but do not hold all of them."""
        placement, together = self.placement, range(self.sizes.lanes)

        def is_lent(stage: int) -> bool:
            holders = placement.holders(stage)
            return placement.is_sharded or any(placement.rank_of(m, stage) not in holders for m in together)

        return frozenset(filter(is_lent, range(self.stages)))

    def own(self, value: Value, rank: int) -> Value:
        """Return what a rank holds of a value of a stage's state: all of it, or the rank's shard."""
        return value.divided(rank + 1, self.ranks) if self.placement.is_sharded else value

    def held_after(self, step: int) -> dict[int, list[Value]]:
        """Return the values that each rank holds when the pipeline has drained after `step` training steps.

        For each stage that it holds, a rank has the newest version and each older one that a later micro-batch reads
        there. Each set of buffers is on the rank that computes with it next. The versions on ranks that take turns may
        have gaps: if micro-batches 0 and 2 of a step read fresh and 1 two steps late, the stale reads move from rank to
        rank.
        """
        sizes, (first, newest) = self.sizes, self.ahead(step)
        held: dict[int, list[Value]] = defaultdict(list)
        for stage in range(sizes.stages):
            versions = {rank: {newest} for rank in self.placement.holders(stage)}
            for m in range(first, first + (self.rule.longest + 1) * sizes.micro_batches):
                versions[self.holder_read(m, stage)].add(min(newest, self.rule.version(m, stage)))
            for rank, numbers in versions.items():
                held[rank] += [self.own(parameters(stage, number), rank) for number in sorted(numbers)]
            for number in range(sizes.statistics):
                held[self.placement.rank_of(self.next_with(number, first), stage)].append(buffers(stage, number))
        return held

    def holder_read(self, micro_batch: int, stage: int) -> int:
        """Return the rank whose copy of the parameters of `stage` a micro-batch reads: its own, or the first holder.

        With shards, the micro-batch reads those of all ranks; its own rank stands for all.
        """
        rank, holders = self.placement.rank_of(micro_batch, stage), self.placement.holders(stage)
        return rank if rank in holders else holders[0]
