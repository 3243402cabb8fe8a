"""A schedule: generator, passes and validation chained into lazy programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cdp_repro.schedule.actions import Slot
from cdp_repro.schedule.collectives import add_all_gathers, add_all_reduces, add_reduce_scatters
from cdp_repro.schedule.communication import (
    add_boundary_messages,
    add_buffer_messages,
    add_parameter_messages,
    add_partial_sums,
    add_sums_at_owners,
    put_off_exchanged_sums,
    put_off_sums_at_owners,
)
from cdp_repro.schedule.generators import TIMELINES
from cdp_repro.schedule.pacing import is_paced, pace_exchanges
from cdp_repro.schedule.passes import order_slots, place
from cdp_repro.schedule.placement import PLACEMENTS, Placement, ShardedZero
from cdp_repro.schedule.rules import Mode, resolve_mode
from cdp_repro.schedule.updates import add_frees, add_shared_updates, add_updates
from cdp_repro.schedule.validation import validated

SLOT_ORDERS = ("paper", "backward_first")
PIPELINE_SCHEDULES = ("one_f_one_b", "gpipe")
COLLECTIVE_PLACEMENTS = ("replicated", "zero")
"""Where each worker is a rank, so that a collective of all ranks is one of all workers."""


@dataclass(frozen=True)
class Schedule:
    """Who computes what, when, with which parameters: validated when made, and again as it runs.

    Build one with `Schedule.build`, which checks its arguments.
    """

    mode: Mode
    placement: Placement
    slot_order: str
    collectives: bool = False
    """Whether the library's collectives take the place of messages."""
    gradient_bytes: tuple[int, ...] = ()
    """Of each stage, () if not known: they say whether gradients are sent in parts."""

    @classmethod
    def build(
        cls,
        mode: str | Sequence[Sequence[int]],
        workers: int,
        stages: int | None = None,
        placement: str = "single_device",
        slot_order: str = "paper",
        *,
        replicas: int = 1,
        pipeline_schedule: str = "one_f_one_b",
        collectives: bool = False,
        gradient_bytes: Sequence[int] = (),
        ahead: bool = True,
    ) -> Schedule:
        """Return the validated schedule of `mode` (a name or a staleness matrix); `stages` defaults to `workers`.

        `replicas` is R, the devices that share a worker's micro-batches. `pipeline_schedule` is how data parallelism
        runs on the placement `pipeline`: `one_f_one_b` or `gpipe`. `collectives`: data parallelism on `replicated` or
        `zero` by collectives of the library, whose sums are in an order of their own, in place of ordered messages; on
        `zero` each rank then has a shard of every stage. `gradient_bytes`, one number a stage, are those of the
        parameters' gradients: where two ranks do nothing but exchange them, and small ones are needed before large ones
        that are there first, the large ones leave in parts.
        `ahead=False` leaves all validation to `slots`, which validates what it yields in any case: for who only
        simulates, and does so at once.

        Raises:
            ValueError: arguments out of range, with a value that works.
            ScheduleError: a staleness that the timeline cannot serve; says where and when it could.
        """
        stages = workers if stages is None else stages
        check_sizes(workers, stages, replicas)
        check_gradient_bytes(gradient_bytes, stages)
        for name, value, choices in (
            ("placement", placement, tuple(PLACEMENTS)),
            ("slot_order", slot_order, SLOT_ORDERS),
            ("pipeline_schedule", pipeline_schedule, PIPELINE_SCHEDULES),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose {', '.join(choices)}")
        resolved = resolve_mode(mode, workers, stages, replicas)
        if placement == "pipeline" and resolved.timeline == "simultaneous":
            resolved = replace(resolved, timeline=pipeline_schedule)
        if placement != "single_device" and resolved.timeline == "sequential":
            raise ValueError(
                f"mode={resolved.name} runs one worker after the other, which needs one device, not "
                f"placement={placement}: use placement=single_device"
            )
        if collectives and (resolved.timeline != "simultaneous" or placement not in COLLECTIVE_PLACEMENTS):
            raise ValueError(
                f"collectives=true needs workers that compute the same stage at once, as mode=dp does on placement="
                f"{' or '.join(COLLECTIVE_PLACEMENTS)}, not mode={resolved.name} on placement={placement}: use "
                f"collectives=false, or mode=dp placement={COLLECTIVE_PLACEMENTS[0]}"
            )
        is_sharded = collectives and placement == "zero" and resolved.micro_batches > 1
        kind = ShardedZero if is_sharded else PLACEMENTS[placement]
        schedule = cls(resolved, kind(resolved), slot_order, collectives, tuple(gradient_bytes))
        if ahead:
            schedule._validate_window()
        return schedule

    def __str__(self) -> str:
        return (
            f"placement {self.placement.name} with workers={self.workers}, stages={self.stages}, "
            f"replicas={self.mode.replicas} in mode {self.mode.name}"
        )

    def data_parallel(self) -> Schedule:
        """Return data parallelism on the same sizes, placement and slot order: what this schedule is compared with."""
        return Schedule.build(
            "dp", self.workers, self.stages, self.placement.name, self.slot_order, replicas=self.mode.replicas,
            collectives=self.collectives, gradient_bytes=self.gradient_bytes,
        )  # fmt: skip

    @property
    def workers(self) -> int:
        """N: workers that share a mini-batch."""
        return self.mode.workers

    @property
    def micro_batches(self) -> int:
        """M = N * R: micro-batches in a training step."""
        return self.mode.micro_batches

    @property
    def stages(self) -> int:
        """S, a multiple of N."""
        return self.mode.stages

    @property
    def ranks(self) -> int:
        """Number of ranks (processes, devices)."""
        return self.placement.ranks

    def slots(self, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
        """Yield the slots of all ranks, lazily, for consecutive training steps pulled from `steps` one by one.

        The first micro-batch starts in `first_slot`; when `steps` ends, the pipeline drains. The actions of a slot
        are in an order in which one process could run them all: nothing waits for what comes later.
        """
        mode, placement = self.mode, self.placement
        slots = TIMELINES[mode.timeline](mode.workers, mode.stages, steps, first_slot, mode.replicas)
        slots = order_slots(slots, self.slot_order == "backward_first")
        slots = place(slots, placement)
        if placement.ranks > 1:
            slots = add_boundary_messages(slots, placement)
            slots = add_buffer_messages(slots, placement)
            slots = (add_all_reduces if self.collectives else add_partial_sums)(slots, placement)
        if placement.lent:
            slots = (add_reduce_scatters if self.collectives else add_sums_at_owners)(slots, placement)
            slots = put_off_sums_at_owners(slots, placement)
        slots = add_updates(slots, placement)
        if any(map(placement.is_shared, range(mode.stages))):
            slots = add_shared_updates(slots, placement)
        if any(placement.is_exchanged(mode.micro_batches - 1, stage) for stage in range(mode.stages)):
            slots = put_off_exchanged_sums(slots, placement)
        if self._is_paced:
            slots = pace_exchanges(slots, placement, self.gradient_bytes)
        if placement.lent:
            slots = (add_all_gathers if self.collectives else add_parameter_messages)(slots, placement)
        slots = add_frees(slots, placement)
        return validated(slots, placement)

    def program(self, rank: int, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
        """Yield the slots of one rank: those of `slots` that hold an action of it, with its actions only."""
        for slot in self.slots(steps, first_slot):
            actions = slot.program_of(rank)
            if actions:
                yield Slot(slot.number, actions)

    def sized(self, gradient_bytes: Sequence[int]) -> Schedule:
        """Return this schedule, validated, for stages whose gradients have so many bytes (see `build`).

        Raises:
            ValueError: another number of stages.
        """
        check_gradient_bytes(gradient_bytes, self.stages)
        schedule = replace(self, gradient_bytes=tuple(gradient_bytes))
        if schedule._is_paced:  # else nothing changes
            schedule._validate_window()
        return schedule

    @property
    def _is_paced(self) -> bool:
        """Whether gradients are sent in parts."""
        return bool(self.gradient_bytes) and not self.collectives and is_paced(self.placement, self.gradient_bytes)

    def _validate_window(self) -> None:
        """Validate from the fill to the drain, over enough steps that the periodic pattern has settled."""
        longest = max(map(self.mode.oldest, range(self.stages)))
        for _ in self.slots(range(longest + 2)):
            pass


def check_gradient_bytes(gradient_bytes: Sequence[int], stages: int) -> None:
    """Raise ValueError unless there is one number a stage, or none."""
    if gradient_bytes and len(gradient_bytes) != stages:
        raise ValueError(f"gradient_bytes has {len(gradient_bytes)} entries: give {stages}, one a stage")


def check_sizes(workers: int, stages: int, replicas: int = 1) -> None:
    """Raise ValueError unless N >= 1 workers of R >= 1 replicas can share S = c*N stages."""
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: at least 1 replica of each worker is needed")
    if workers < 1:
        raise ValueError(f"workers={workers}: at least 1 worker is needed")
    if stages < 1 or stages % workers:
        lower = stages // workers * workers
        choices = " or ".join(f"stages={value}" for value in (lower, lower + workers) if value >= workers)
        raise ValueError(f"stages={stages} is not a multiple of workers={workers}: use {choices}")
