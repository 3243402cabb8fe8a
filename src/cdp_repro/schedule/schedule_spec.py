"""A spec: what a user chooses of a schedule, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

from cdp_repro.schedule.branches import chain
from cdp_repro.schedule.by_name import nearest
from cdp_repro.schedule.modes import DEFAULT_SLACK, MODE_SIZES, MODES, Mode
from cdp_repro.schedule.placements import PLACEMENTS
from cdp_repro.schedule.rules import Matrix
from cdp_repro.schedule.sizes import Sizes

SLOT_ORDERS = ("paper", "backward_first")
PIPELINE_SCHEDULES = ("one_f_one_b", "gpipe")
PLACEMENT_SIZES = {"ranks": "pipeline", "servers": "parameter_server"}
"""For each size that only one placement has, the name of that placement."""
SPEED_PLACEMENTS = ("single_device", "parameter_server")
"""Placements on which workers may have speeds of their own."""
CHOOSING_PLACEMENTS = ("single_device", "pipeline")
"""Placements on which M may be any number. Elsewhere each worker has k micro-batches, so M = k N R."""
COLLECTIVE_PLACEMENTS = ("replicated", "zero")
"""Placements on which each worker is a rank, so a collective of all ranks is one of all workers."""


@dataclass(frozen=True)
class Spec:
    """The choices of a user: plain data, checked when a `Schedule` is made from them."""

    mode: str | tuple[tuple[int, ...], ...]
    """A name, or a staleness matrix for the cyclic timeline: a row for each turn of a step."""
    workers: int
    """N: workers that take the micro-batches in turn; N R L are under way at once. `accumulation` and pipelines that
    flush use N only to give M."""
    stages: int
    """S."""
    placement: str = "single_device"
    slot_order: str = "paper"
    """How a device orders the actions of a slot: `paper` (forwards first) or `backward_first`."""
    accumulate: int = 1
    """k: micro-batches that a worker runs in a training step, one after the other."""
    replicas: int = 1
    """R: micro-batches that a worker computes at once, each on a rank of its own."""
    ranks: int | None = None
    """D: ranks over which the stages of one pipeline are spread, for the placement `pipeline` only; None: N."""
    servers: int | None = None
    """P: ranks that hold the stages, for the placement `parameter_server` only; None: 1."""
    speeds: tuple[int, ...] | None = None
    """Micro-batches that each worker computes in the same time, for `dp`, `ssp` and `async`; None: all are equal."""
    jitter: int | None = None
    """Seed of uneven times of micro-batches, for `ssp` and `async`; None: all of a worker take the same time."""
    message_time: float | None = None
    """Time of a pull, and of a push, in micro-batches of the fastest worker, for `ssp` and `async`; None: 0."""
    slack: int | None = None
    """Pushes by which a worker may be ahead of the slowest one when it starts, for `ssp` only; None: 3."""
    micro_batches: int | None = None
    """M / (R L), on `CHOOSING_PLACEMENTS`; None: k N."""
    slices: int | None = None
    """L: micro-batches that sequences are cut into along their tokens, for `terapipe` only; None: 2."""
    sources: tuple[tuple[int, ...], ...] | None = None
    """For each stage, the earlier stages whose outputs it reads (`branches`); None: a chain."""
    pipeline_schedule: str = "one_f_one_b"
    """How data parallelism runs on the placement `pipeline`: `one_f_one_b` or `gpipe`."""
    collectives: bool = False
    """Whether data parallelism on `replicated` or `zero` uses the library's collectives in place of ordered messages.
    Collectives sum in an order of their own; on `zero` each rank then has a shard of every stage."""

    @property
    def chosen_mode(self) -> Mode:
        """The mode of the name or matrix `mode`; `dp` on a pipeline has the timeline `pipeline_schedule`.

        Raises:
            ValueError: there is no mode of that name.
        """
        if not isinstance(self.mode, (str, tuple)):
            raise ValueError(f"mode={self.mode!r}: give a name, such as 'cdp_v2', or a staleness matrix")
        if not isinstance(self.mode, str):
            rows = self.mode
            return Mode("cyclic", lambda sizes: Matrix(sizes, rows))
        if self.mode not in MODES:
            ways = f"choose {', '.join(MODES)} or give a staleness matrix{nearest(self.mode, MODES, 0.3)}"
            raise ValueError(f"unknown mode {self.mode!r}: {ways}")
        mode = MODES[self.mode]
        if mode.timeline_class.is_simultaneous and self.placement == "pipeline":
            return replace(mode, timeline=self.pipeline_schedule)
        return mode

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes, with defaults filled in."""
        pipeline_ranks = 1 if self.placement != "pipeline" else self.workers if self.ranks is None else self.ranks
        mode = self.chosen_mode
        slack = DEFAULT_SLACK if self.slack is None else self.slack
        return Sizes(
            stages=self.stages,
            workers=self.workers,
            accumulate=self.accumulate,
            replicas=self.replicas,
            pipeline_ranks=pipeline_ranks,
            servers=1 if self.servers is None else self.servers,
            updates_each=mode.updates_each,
            has_own_clocks=mode.has_own_clocks,
            speeds=self.speeds or (),
            jitter=self.jitter,
            message_time=self.message_time or 0,
            slack=slack if "slack" in mode.sizes else None,
            slices=mode.slices(self.slices),
            chosen_turns=self.micro_batches,
            chosen_sources=() if self.sources is None or self.sources == chain(self.stages) else self.sources,
        )

    @property
    def mode_name(self) -> str:
        """The name of the mode; `matrix` for a staleness matrix."""
        return self.mode if isinstance(self.mode, str) else "matrix"

    def __str__(self) -> str:
        return (
            f"placement {self.placement} with workers={self.workers}, stages={self.stages}, replicas={self.replicas} "
            f"in mode {self.mode_name}"
        )

    def on(self, placement: str) -> Spec:
        """Return the same spec on another placement, without the sizes that only other placements have."""
        left_out: dict[str, Any] = {name: None for name, of in PLACEMENT_SIZES.items() if of != placement}
        return replace(self, placement=placement, **left_out)

    def in_mode(self, mode: str | tuple[tuple[int, ...], ...]) -> Spec:
        """Return the same spec in another mode, without the sizes that this mode does not have."""
        moved = replace(self, mode=mode)
        left_out: dict[str, Any] = {name: None for name in MODE_SIZES if name not in moved.chosen_mode.sizes}
        return replace(moved, **left_out)

    def faults(self) -> list[str]:
        """Return a sentence, with values that work, for each value of a wrong type, or of another mode or placement.

        Sentences that would hide others stand alone. Else the last is the first reason why the sizes do not fit
        together or, if there is no other fault, why the timeline cannot have them.
        """
        if found := [*self._of_other_types()] or [*self._unknown()]:
            return found
        own = self.on(self.placement).in_mode(self.mode)
        sizes = self.sizes if own == self else own.sizes  # kept, as they take time where workers have clocks
        found = [
            *self._of_other_choices(),
            *self._of_other_modes(),
            *self._wrong_with_micro_batches(),
            *fault_in(lambda: sizes.check(lambda each: not self.timeline_faults(each))),
        ]
        return found or self.timeline_faults(sizes)

    def timeline_faults(self, sizes: Sizes) -> list[str]:
        """Return why the timeline of the mode cannot have these sizes on the placement; [] if it can."""
        return fault_in(lambda: self.chosen_mode.timeline_class(sizes).check(self.placement))

    def _of_other_types(self) -> Iterator[str]:
        for name, kind in kinds().items():
            if name != "mode" and not is_of(value := getattr(self, name), kind):  # the rule of a matrix checks it
                yield f"{name}={value!r} is of the type {type(value).__name__}: {named(kind)} is needed"

    def _unknown(self) -> Iterator[str]:
        for name, value, choices in (
            ("placement", self.placement, PLACEMENTS),
            ("slot_order", self.slot_order, SLOT_ORDERS),
            ("pipeline_schedule", self.pipeline_schedule, PIPELINE_SCHEDULES),
        ):
            if value not in choices:
                yield f"unknown {name} {value!r}: choose {', '.join(choices)}"
        yield from fault_in(lambda: self.chosen_mode.timeline_class)

    def _of_other_choices(self) -> Iterator[str]:
        """Yield a sentence for each size that the placement or the mode does not have."""
        for name, of in PLACEMENT_SIZES.items():
            if (value := getattr(self, name)) is not None and self.placement != of:
                yield (
                    f"{name}={value} is for placement={of}; placement={self.placement} derives its ranks from "
                    f"workers, stages and replicas: leave {name} out"
                )
        for name in MODE_SIZES:
            if (value := getattr(self, name)) is not None and name not in self.chosen_mode.sizes:
                modes = [each for each, mode in MODES.items() if name in mode.sizes]
                shown = [*value] if isinstance(value, tuple) else value
                yield (
                    f"{name}={shown} is for mode={' or '.join(modes)}; mode={self.mode_name} has none: leave {name} out"
                )
        if self.speeds is not None and "speeds" in self.chosen_mode.sizes and self.placement not in SPEED_PLACEMENTS:
            yield (
                f"speeds={[*self.speeds]} needs workers that wait only for parameters, not "
                f"placement={self.placement}: use placement={' or '.join(SPEED_PLACEMENTS)}"
            )

    def _of_other_modes(self) -> Iterator[str]:
        """Yield a sentence for what the mode's timeline or its updates do not allow."""
        mode = self.chosen_mode
        allowed = ("single_device", "pipeline") if mode.updates_each else mode.timeline_class.placements
        if allowed is not None and self.placement not in allowed:
            yield f"mode={self.mode_name} is not for placement={self.placement}: use placement={' or '.join(allowed)}"
        if (mode.updates_each or mode.has_own_clocks) and self.accumulate > 1:
            works = "" if mode.has_own_clocks else ", or mode=pipedream_2bw"
            yield (
                f"mode={self.mode} makes an update after each micro-batch, not after accumulate={self.accumulate} "
                f"of them a worker: use accumulate=1{works}"
            )
        is_simultaneous = mode.timeline_class.is_simultaneous
        if self.collectives and (not is_simultaneous or self.placement not in COLLECTIVE_PLACEMENTS):
            yield (
                f"collectives=true needs workers that compute the same stage at once, as mode=dp does on placement="
                f"{' or '.join(COLLECTIVE_PLACEMENTS)}, not mode={self.mode_name} on placement={self.placement}: use "
                f"collectives=false, or mode=dp placement={COLLECTIVE_PLACEMENTS[0]}"
            )

    def _wrong_with_micro_batches(self) -> Iterator[str]:
        """Yield a sentence if M is chosen although other settings give it, or if it is below 1."""
        chosen, mode = self.micro_batches, self.chosen_mode
        if chosen is None:
            return
        has_one_update = not mode.updates_each and not mode.has_own_clocks and self.speeds is None
        if self.placement not in CHOOSING_PLACEMENTS or not has_one_update:
            speeds = "" if self.speeds is None else f" with speeds={[*self.speeds]}"
            yield (
                f"micro_batches={chosen} is for modes on placement={' or '.join(CHOOSING_PLACEMENTS)} with one update "
                f"after them, not for mode={self.mode_name} on placement={self.placement}{speeds}: leave it out"
            )
        elif self.accumulate > 1:
            yield f"micro_batches={chosen} and accumulate={self.accumulate} both say how many: leave one out"
        elif chosen < 1:
            yield f"micro_batches={chosen}: at least 1 is needed"


def fault_in(check: Callable[[], object]) -> list[str]:
    """Return what a check refuses, as a list of none or one."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


@cache
def kinds() -> dict[str, Any]:
    """Return the type of each field of `Spec`."""
    return get_type_hints(Spec)


def is_of(value: object, kind: Any) -> bool:
    """Return whether a value is of a type: a plain one, a tuple of one, or a union."""
    if isinstance(kind, UnionType):
        return any(is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_of(each, get_args(kind)[0]) for each in value)
    return type(value) is kind or (kind is float and type(value) is int)


def named(kind: Any) -> str:
    """Return how a message names a type."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


class Choices(TypedDict, total=False):
    """The fields of `Spec` with a default, except placement and slot order, in the types that people write."""

    accumulate: int
    replicas: int
    ranks: int | None
    servers: int | None
    speeds: Sequence[int] | None
    jitter: int | None
    message_time: float | None
    slack: int | None
    micro_batches: int | None
    slices: int | None
    sources: Sequence[Sequence[int]] | None
    pipeline_schedule: str
    collectives: bool


def frozen(value: Any) -> Any:
    """Return a value in the form that `Spec` has: sequences as tuples."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(map(frozen, value)) if is_sequence else value
