"""A schedule: the choice of a timeline, a rule and a placement, for given sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, TypedDict, Unpack

from cdp_repro.schedule.branches import chain
from cdp_repro.schedule.by_name import ByName
from cdp_repro.schedule.placements import PLACEMENTS, Placement
from cdp_repro.schedule.rules import Clock, Fresh, Freshest, Matrix, NoStashing, Rule, UniformDelay
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines import TIMELINES
from cdp_repro.schedule.timelines.timeline import Timeline

SLOT_ORDERS = ("paper", "backward_first")
PIPELINE_SCHEDULES = ("one_f_one_b", "gpipe")
PLACEMENT_SIZES = {"ranks": "pipeline", "servers": "parameter_server"}
"""For each size that only one placement has, the name of that placement."""
OF_CLOCKS = ("speeds", "jitter", "message_time")
"""Sizes of modes whose workers run on clocks of their own."""
MODE_SIZES = (*OF_CLOCKS, "slack", "slices")
"""Sizes that only some modes have."""
SPEED_PLACEMENTS = ("single_device", "parameter_server")
"""Placements on which workers may have speeds of their own."""
DEFAULT_SLACK, DEFAULT_SLICES = 3, 2
CHOOSING_PLACEMENTS = ("single_device", "pipeline")
"""Placements on which M may be any number. Elsewhere workers are ranks, each with k micro-batches."""
COLLECTIVE_PLACEMENTS = ("replicated", "zero")
"""Placements on which each worker is a rank, so a collective of all ranks is one of all workers."""


@dataclass(frozen=True)
class Mode:
    """A timeline with a rule."""

    timeline: str
    """A name in `TIMELINES`."""
    rule: Callable[[Sizes], Rule]
    updates_each: bool = False
    """Whether each micro-batch is a training step of its own."""
    sizes: tuple[str, ...] = ()
    """Those of `MODE_SIZES` that the mode has."""

    @property
    def pushes(self) -> bool:
        """Whether workers run on clocks of their own, and each micro-batch is an update."""
        return self.timeline == "clocked"

    def slices(self, chosen: int | None) -> int:
        """Return L: `chosen`, or its default, if the mode cuts micro-batches along the tokens; else 1."""
        if "slices" not in self.sizes:
            return 1
        return DEFAULT_SLICES if chosen is None else chosen


MODES: ByName[Mode] = ByName(
    "modes",
    {
        "dp": Mode("simultaneous", Fresh, sizes=("speeds",)),
        "cdp_v1": Mode("cyclic", UniformDelay),
        "cdp_v2": Mode("cyclic", Freshest),
        "accumulation": Mode("sequential", Fresh),
        "naive": Mode("sequential", Fresh),
        "gpipe": Mode("gpipe", Fresh),
        "one_f_one_b": Mode("one_f_one_b", Fresh),
        "interleaved": Mode("interleaved", Fresh),
        "zero_bubble": Mode("zero_bubble", Fresh),
        "terapipe": Mode("terapipe", Fresh, sizes=("slices",)),
        "chimera": Mode("chimera", Fresh),
        "pipedream": Mode("cyclic", Freshest, updates_each=True),
        "pipedream_2bw": Mode("cyclic", UniformDelay),
        "ampnet": Mode("cyclic", NoStashing, updates_each=True),
        "ssp": Mode("clocked", Clock, sizes=(*OF_CLOCKS, "slack")),
        "async": Mode("clocked", Clock, sizes=OF_CLOCKS),
    },
)
"""By name, the paper's first. Some modes are the same under the names of two literatures."""


def add_timeline(timeline: type[Timeline]) -> None:
    """Enter a timeline under its name, for modes to use."""
    TIMELINES[timeline.name] = timeline


def add_mode(
    name: str, timeline: str, rule: Callable[[Sizes], Rule], updates_each: bool = False, sizes: tuple[str, ...] = ()
) -> None:
    """Enter a mode: the name of a timeline, with a rule that is made from the sizes; see `Mode`."""
    MODES[name] = Mode(timeline, rule, updates_each, sizes)


def add_placement(placement: type[Placement]) -> None:
    """Enter a placement under its name."""
    PLACEMENTS[placement.name] = placement


@dataclass(frozen=True)
class Spec:
    """The choices of a user: plain data, checked when a `Schedule` is made from them."""

    mode: str | tuple[tuple[int, ...], ...]
    """A name, or a staleness matrix for the cyclic timeline: a row for each turn of a step."""
    workers: int
    """N."""
    stages: int
    """S."""
    placement: str = "single_device"
    slot_order: str = "paper"
    """How a device orders the actions of a slot: `paper` (forwards first) or `backward_first`."""
    accumulate: int = 1
    """k."""
    replicas: int = 1
    """R."""
    ranks: int | None = None
    """D, for the placement `pipeline` only; None: N."""
    servers: int | None = None
    """P, for the placement `parameter_server` only; None: 1."""
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
        if not isinstance(self.mode, str):
            rows = self.mode
            return Mode("cyclic", lambda sizes: Matrix.checked(sizes, rows))
        if self.mode not in MODES:
            nearest = difflib.get_close_matches(self.mode, MODES, n=1, cutoff=0.3)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown mode {self.mode!r}: choose {', '.join(MODES)} or give a staleness matrix{hint}")
        mode = MODES[self.mode]
        if mode.timeline == "simultaneous" and self.placement == "pipeline":
            return replace(mode, timeline=self.pipeline_schedule)
        return mode

    @property
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
            pushes=mode.pushes,
            speeds=tuple(self.speeds or ()),
            jitter=self.jitter,
            message_time=self.message_time or 0,
            slack=slack if "slack" in mode.sizes else None,
            slices=mode.slices(self.slices),
            chosen_turns=self.micro_batches,
            branches=() if self.sources is None or self.sources == chain(self.stages) else self.sources,
        )

    def __str__(self) -> str:
        return (
            f"placement {self.placement} with workers={self.workers}, stages={self.stages}, replicas={self.replicas} "
            f"in mode {_name(self.mode)}"
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

    @property
    def forwards(self) -> int:
        """Number of forwards in a training step: M S."""
        return self.sizes.micro_batches * self.stages


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
        """Return the schedule of a `Spec` with these values; `stages` defaults to `workers`."""
        others = {name: frozen(value) for name, value in choices.items()}
        number = workers if stages is None else stages
        return cls.from_spec(Spec(frozen(mode), workers, number, placement, slot_order, **others), gradient_bytes)

    @classmethod
    def from_spec(cls, spec: Spec, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the schedule that `spec` describes; `Program` checks whether its timeline can serve its rule.

        Raises:
            ValueError: values are out of range or do not fit together; names values that work.
        """
        for name, value, choices in (
            ("placement", spec.placement, PLACEMENTS),
            ("slot_order", spec.slot_order, SLOT_ORDERS),
            ("pipeline_schedule", spec.pipeline_schedule, PIPELINE_SCHEDULES),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose {', '.join(choices)}")
        for name, of in PLACEMENT_SIZES.items():
            if (value := getattr(spec, name)) is not None and spec.placement != of:
                raise ValueError(
                    f"{name}={value} is for placement={of}; placement={spec.placement} derives its ranks from "
                    f"workers, stages and replicas: leave {name} out"
                )
        mode = spec.chosen_mode  # first: an unknown mode has no sizes to check
        _check_mode_sizes(spec)
        sizes = spec.sizes
        sizes.check()
        timeline = TIMELINES[mode.timeline](sizes)
        allowed = ("single_device", "pipeline") if mode.updates_each else timeline.placements
        if allowed is not None and spec.placement not in allowed:
            raise ValueError(
                f"mode={_name(spec.mode)} is not for placement={spec.placement}: use placement={' or '.join(allowed)}"
            )
        if (mode.updates_each or mode.pushes) and spec.accumulate > 1:
            works = "" if mode.pushes else ", or mode=pipedream_2bw"
            raise ValueError(
                f"mode={spec.mode} makes an update after each micro-batch, not after accumulate={spec.accumulate} "
                f"of them a worker: use accumulate=1{works}"
            )
        _check_micro_batches(spec)
        timeline.check(spec.placement)
        if spec.collectives and (mode.timeline != "simultaneous" or spec.placement not in COLLECTIVE_PLACEMENTS):
            raise ValueError(
                f"collectives=true needs workers that compute the same stage at once, as mode=dp does on placement="
                f"{' or '.join(COLLECTIVE_PLACEMENTS)}, not mode={_name(spec.mode)} on placement={spec.placement}: use "
                f"collectives=false, or mode=dp placement={COLLECTIVE_PLACEMENTS[0]}"
            )
        placement = PLACEMENTS[spec.placement].for_timeline(timeline, spec.collectives)
        return cls(spec, timeline, mode.rule(sizes), placement).sized(gradient_bytes)

    def sized(self, gradient_bytes: Sequence[int]) -> Schedule:
        """Return this schedule for stages whose gradients have these numbers of bytes.

        Raises:
            ValueError: there is not one number per stage, or one is negative.
        """
        if gradient_bytes and len(gradient_bytes) != self.stages:
            raise ValueError(f"gradient_bytes has {len(gradient_bytes)} entries: give {self.stages}, one a stage")
        if any(size < 0 for size in gradient_bytes):
            raise ValueError(f"gradient_bytes={[*gradient_bytes]}: give 0 or more, one number a stage")
        return replace(self, gradient_bytes=tuple(gradient_bytes))

    def __str__(self) -> str:
        return str(self.spec)

    def data_parallel(self) -> Schedule:
        """Return data parallelism on the same sizes, placement and slot order, to compare this schedule with."""
        return Schedule.from_spec(self.spec.in_mode("dp"), self.gradient_bytes)

    @property
    def mode(self) -> str:
        """The name of the mode; `matrix` for a staleness matrix."""
        return _name(self.spec.mode)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the timeline."""
        return self.timeline.sizes

    @property
    def workers(self) -> int:
        """N."""
        return self.sizes.workers

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
        if not self.timeline.lanes.turns:
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

    @cached_property
    def lent(self) -> frozenset[int]:
        """The stages whose parameters are brought to ranks that compute with them but do not hold all of them."""
        return frozenset(
            stage
            for stage in range(self.stages)
            if self.placement.is_sharded
            or any(
                self.placement.rank_of(m, stage) not in self.placement.holders(stage) for m in range(self.sizes.lanes)
            )
        )

    def holder_read(self, micro_batch: int, stage: int) -> int:
        """Return the rank whose copy of the parameters of `stage` a micro-batch reads: its own, or the first holder.

        With shards, the micro-batch reads those of all ranks; its own rank stands for all.
        """
        rank, holders = self.placement.rank_of(micro_batch, stage), self.placement.holders(stage)
        return rank if rank in holders else holders[0]


def _check_mode_sizes(spec: Spec) -> None:
    """Raise ValueError for a size that the mode does not have, and for speeds on a placement without them."""
    for name in MODE_SIZES:
        if (value := getattr(spec, name)) is not None and name not in spec.chosen_mode.sizes:
            modes = [each for each, mode in MODES.items() if name in mode.sizes]
            shown = [*value] if isinstance(value, tuple) else value
            raise ValueError(
                f"{name}={shown} is for mode={' or '.join(modes)}; mode={_name(spec.mode)} has none: leave {name} out"
            )
    if spec.speeds is not None and spec.placement not in SPEED_PLACEMENTS:
        raise ValueError(
            f"speeds={[*spec.speeds]} needs workers that wait only for parameters, not placement={spec.placement}: use "
            f"placement={' or '.join(SPEED_PLACEMENTS)}"
        )


def _check_micro_batches(spec: Spec) -> None:
    """Raise ValueError, with advice, if M is chosen although other settings give it, or if M is too small."""
    chosen, mode = spec.micro_batches, spec.chosen_mode
    if chosen is None:
        return
    if spec.placement not in CHOOSING_PLACEMENTS or mode.updates_each or mode.pushes or spec.speeds is not None:
        raise ValueError(
            f"micro_batches={chosen} is for modes on placement={' or '.join(CHOOSING_PLACEMENTS)} with one update "
            f"after them, not for mode={_name(spec.mode)} on placement={spec.placement}: leave it out"
        )
    if spec.accumulate > 1:
        raise ValueError(f"micro_batches={chosen} and accumulate={spec.accumulate} both say how many: leave one out")
    least = spec.workers if mode.timeline == "cyclic" else 1
    if chosen < least:
        raise ValueError(f"micro_batches={chosen}: this mode has at least {least} in a training step")


def _name(mode: str | Sequence[Sequence[int]]) -> str:
    return mode if isinstance(mode, str) else "matrix"
