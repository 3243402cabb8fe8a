"""A schedule: generator, passes and validation chained into lazy programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cdp_repro.schedule.actions import Slot
from cdp_repro.schedule.generators import TIMELINES
from cdp_repro.schedule.passes import add_frees, add_updates, assign_versions, order_slots
from cdp_repro.schedule.placement import PLACEMENTS, Placement
from cdp_repro.schedule.rules import Mode, resolve_mode
from cdp_repro.schedule.validation import validated

SLOT_ORDERS = ("paper", "backward_first")


@dataclass(frozen=True)
class Schedule:
    """Who computes what, when, with which parameters: validated when made, and again as it runs.

    Build one with `Schedule.build`, which checks its arguments.
    """

    workers: int
    """N: micro-batches per training step."""
    stages: int
    """S, a multiple of N."""
    mode: Mode
    placement: Placement
    slot_order: str

    @classmethod
    def build(
        cls,
        mode: str | Sequence[Sequence[int]],
        workers: int,
        stages: int | None = None,
        placement: str = "single_device",
        slot_order: str = "paper",
    ) -> Schedule:
        """Return the validated schedule of `mode` (a name or a staleness matrix); `stages` defaults to `workers`.

        Raises:
            ValueError: arguments out of range, with a value that works.
            ScheduleError: a staleness that the timeline cannot serve; says where and when it could.
        """
        stages = workers if stages is None else stages
        check_sizes(workers, stages)
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: choose {', '.join(PLACEMENTS)}")
        if slot_order not in SLOT_ORDERS:
            raise ValueError(f"unknown slot_order {slot_order!r}: choose {', '.join(SLOT_ORDERS)}")
        schedule = cls(workers, stages, resolve_mode(mode, workers, stages), PLACEMENTS[placement], slot_order)
        schedule._validate_window()
        return schedule

    def data_parallel(self) -> Schedule:
        """Return data parallelism on the same sizes, placement and slot order: what this schedule is compared with."""
        return Schedule.build("dp", self.workers, self.stages, self.placement.name, self.slot_order)

    @property
    def ranks(self) -> int:
        """Number of ranks (processes, devices)."""
        return self.placement.ranks(self.workers, self.stages)

    def slots(self, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
        """Yield the slots of all ranks, lazily, for consecutive training steps pulled from `steps` one by one.

        The first micro-batch starts in `first_slot`; when `steps` ends, the pipeline drains.
        """
        slots = TIMELINES[self.mode.timeline](self.workers, self.stages, steps, first_slot)
        slots = order_slots(slots, self.slot_order == "backward_first")
        slots = assign_versions(slots, self.mode)
        slots = add_updates(slots, self.workers)
        slots = add_frees(slots, self.mode)
        return validated(slots, self.mode)

    def program(self, rank: int, steps: Iterable[int], first_slot: int = 0) -> Iterator[Slot]:
        """Yield the slots of one rank: those of `slots` that hold an action of it, with its actions only."""
        for slot in self.slots(steps, first_slot):
            actions = tuple(action for action in slot.actions if rank in self.placement.ranks_of(action))
            if actions:
                yield Slot(slot.number, actions)

    def _validate_window(self) -> None:
        """Validate from the fill to the drain, over enough steps that the periodic pattern has settled."""
        longest = max(self.mode.oldest(stage) for stage in range(self.stages))
        for _ in self.slots(range(longest + 2)):
            pass


def check_sizes(workers: int, stages: int) -> None:
    """Raise ValueError unless N >= 1 workers can share S = c*N stages."""
    if workers < 1:
        raise ValueError(f"workers={workers}: at least 1 worker is needed")
    if stages < 1 or stages % workers:
        lower = stages // workers * workers
        choices = " or ".join(f"stages={value}" for value in (lower, lower + workers) if value >= workers)
        raise ValueError(f"stages={stages} is not a multiple of workers={workers}: use {choices}")
