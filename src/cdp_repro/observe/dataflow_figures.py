"""Pictures of what a program does with its values: the path of a micro-batch, a sum of gradients, parameter versions.

Rows are ranks and columns are slots. All of it is read from the actions of a `Program`, so that a picture cannot differ
from what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cdp_repro.observe.figures import COLOURS
from cdp_repro.schedule import Action, Op, Program, Slot, Value
from cdp_repro.schedule.values import Kind

_GREY, _LINE = "#EEEEEE", "#333333"

_AFTER_ARRIVAL = 0.04
"""Slots between the arrival of a message and the action that waits for it, so that both can be seen."""

Wanted = Callable[[Value], bool]
"""Whether a picture shows a value."""


@dataclass
class Life:
    """A value on one rank, from its write or arrival to its last read. Times are in slots."""

    rank: int
    value: Value
    begin: float
    end: float
    reads: list[tuple[float, Action]] = field(default_factory=list)


@dataclass(frozen=True)
class Journey:
    """A message: `read` leaves the source as `value`, and is taken to arrive at once."""

    value: Value
    read: Value
    source: int
    destination: int
    time: float


def moments(slots: Iterable[Slot]) -> Iterator[tuple[float, Action]]:
    """Yield each action with its time, in the order of the program.

    A rank's actions of a slot share the slot evenly; one that waits for a message of the same slot comes after it.
    """
    arrivals: dict[tuple[int, Value], float] = {}
    for slot in slots:
        numbers = Counter(action.rank for action in slot.actions if action.op is not Op.RECEIVE)
        places: Counter[int] = Counter()
        for action in slot.actions:
            if action.op is not Op.RECEIVE:
                places[action.rank] += 1
            here = [arrivals.get((action.rank, value), 0.0) + _AFTER_ARRIVAL for value in action.reads]
            time = max([slot.number + places[action.rank] / (numbers[action.rank] + 1), *here])
            if action.op is Op.SEND and action.value is not None:
                arrivals[action.peer, action.value] = time
            yield time, action


def lives(program: Program, shown: range, wanted: Wanted) -> list[Life]:
    """Return the lives of wanted values in the shown slots of a run from step 0, ordered by their beginnings."""
    slots = _slots_of(program, shown)
    here: dict[tuple[int, Value], Life] = {}
    found: list[Life] = []

    def begin(rank: int, value: Value, time: float) -> None:
        if wanted(value):
            here[rank, value] = Life(rank, value, time, float(len(slots)))
            found.append(here[rank, value])

    for rank, values in program.schedule.held_after(0).items():
        for value in values:
            begin(rank, value, 0.0)
    for time, action in moments(slots):
        for value in action.reads:
            if (life := here.get((action.rank, value))) is not None:
                life.reads.append((time, action))
        for value in action.frees:
            if (life := here.pop((action.rank, value), None)) is not None:
                life.end = time
        if action.op is Op.SEND and action.value is not None:
            begin(action.peer, action.value, time)
        elif action.op is not Op.RECEIVE:
            for value in action.writes:
                begin(action.rank, value, time)
    return sorted((life for life in found if life.end > shown.start and life.begin < shown.stop), key=_begin)


def journeys(program: Program, shown: range, wanted: Wanted) -> list[Journey]:
    """Return the messages with wanted values that leave in the shown slots of a run from step 0."""
    return [
        Journey(action.value, action.reads[0], action.rank, action.peer, time)
        for time, action in moments(_slots_of(program, shown))
        if action.op is Op.SEND and action.value is not None and wanted(action.value) and int(time) in shown
    ]


def micro_batch_figure(programs: dict[str, Program], micro_batch: int, shown: range) -> Figure:
    """Draw the path of one micro-batch over ranks and slots, for each program; all other compute is grey."""

    def wanted(value: Value) -> bool:
        return value.kind in (Kind.INPUT, Kind.OUTPUT_GRADIENT) and value.number == micro_batch

    figure, axes = _figure([program.schedule.ranks for program in programs.values()], shown)
    for axis, (title, program) in zip(axes, programs.items(), strict=True):
        for slot in _slots_of(program, shown):
            for action in slot.actions:
                if action.op.is_compute and slot.number in shown:
                    _cell(axis, slot.number, action, action.micro_batch == micro_batch)
        for journey in journeys(program, shown, wanted):
            next_slot = int(journey.time) + 1  # an arrow leads from cell to cell, over the line between two slots
            _arrow(axis, (next_slot - 0.12, journey.source + 0.5), (next_slot + 0.12, journey.destination + 0.5))
            middle = (journey.source + journey.destination) / 2 + 0.5
            axis.text(next_slot + 0.06, middle, str(journey.value), fontsize=6.5, va="center")
        ranks = range(program.schedule.ranks)
        axis.set(ylim=(len(ranks), 0))
        _dress(axis, title, shown, {rank: rank + 0.5 for rank in ranks})
    axes[-1].set_xlabel("slot")
    return figure


def gradient_sum_figure(program: Program, stage: int, version: int, shown: range) -> Figure:
    """Draw the sum from which a version of a stage is made: its parts on each rank, its messages, and the updates.

    The colour of a bar is the number of micro-batches in the sum.
    """
    step = program.schedule.micro_batches
    members = range((version - 1) * step, version * step)

    def wanted(value: Value) -> bool:
        return value.kind == Kind.GRADIENTS and value.stage == stage and value.number in members

    rows = _Rows(lives(program, shown, wanted))
    figure, (axis,) = _figure([rows.height], shown)
    _bars(axis, rows, shown, lambda value: len(value.members) - 1)
    for journey in journeys(program, shown, wanted):
        source, destination = (
            next(
                life
                for life in rows.lives
                if (life.rank, life.value) == place and life.begin <= journey.time <= life.end
            )
            for place in ((journey.source, journey.read), (journey.destination, journey.value))
        )
        _arrow(axis, (journey.time, rows.bottom(source) + 0.5), (journey.time, rows.bottom(destination) + 0.5))
    for life in rows.lives:
        for time, action in life.reads:
            if action.op is Op.UPDATE:
                axis.plot([time], [rows.bottom(life) + 0.3], "o", color="black", markersize=4)
                axis.text(time + 0.06, rows.bottom(life) + 0.3, action.label, fontsize=7, ha="left", va="center")
    rows.dress(axis, f"sum of version {version} of stage {stage}", shown)
    axis.set_xlabel("slot")
    return figure


def versions_figure(programs: dict[str, Program], stage: int, shown: range) -> Figure:
    """Draw the versions of a stage's parameters on each rank that holds it, with the compute that reads them."""

    def wanted(value: Value) -> bool:
        return value.kind == Kind.PARAMETERS and value.stage == stage

    drawn = {title: _Rows(lives(program, shown, wanted)) for title, program in programs.items()}
    figure, axes = _figure([rows.height for rows in drawn.values()], shown)
    for axis, (title, rows) in zip(axes, drawn.items(), strict=True):
        _bars(axis, rows, shown, lambda value: value.number)
        for life in rows.lives:
            for time, action in life.reads:
                if action.op.is_compute and int(time) in shown:
                    text = f"{action.op}{stage}.m{action.micro_batch}"
                    middle = min(int(time) + 0.5, life.end - 0.2)
                    axis.text(middle, rows.bottom(life) + 0.24, text, fontsize=6.5, ha="center", va="center")
        rows.dress(axis, f"{title}: stage {stage}", shown)
    axes[-1].set_xlabel("slot")
    return figure


def _slots_of(program: Program, shown: range) -> list[Slot]:
    """Return the slots of a run that is long enough for its drain to come after the shown slots."""
    return program.slots(shown.stop // program.schedule.slots_per_step + 2)


def _begin(life: Life) -> tuple[float, int]:
    return life.begin, life.rank


class _Rows:
    """The row of each life's bar; a rank has as many rows as it needs so that no bar covers another."""

    def __init__(self, shown: Sequence[Life]) -> None:
        self.lives = shown
        ends: dict[int, list[float]] = {rank: [] for rank in sorted({life.rank for life in shown})}
        row_of: list[int] = []
        for life in shown:
            row = next((row for row, end in enumerate(ends[life.rank]) if end <= life.begin), len(ends[life.rank]))
            ends[life.rank][row : row + 1] = [life.end]
            row_of.append(row)
        tops = accumulate((len(rows) for rows in ends.values()), initial=0)
        self._tops = dict(zip(ends, tops, strict=False))
        self._numbers = {rank: len(rows) for rank, rows in ends.items()}
        self._bottoms = {
            id(life): -float(self._tops[life.rank] + row + 1) for life, row in zip(shown, row_of, strict=True)
        }

    @property
    def height(self) -> int:
        """Number of rows of all ranks."""
        return sum(self._numbers.values())

    def bottom(self, life: Life) -> float:
        """Return the bottom of a bar, which is 1 high; the first rank is at the top."""
        return self._bottoms[id(life)]

    def dress(self, axis: Axes, title: str, shown: range) -> None:
        """Draw the borders between ranks, and everything around the bars."""
        for top in self._tops.values():
            axis.axhline(-top, color=_LINE, linewidth=0.6)
        axis.set(ylim=(-self.height, 0))
        _dress(axis, title, shown, {rank: -top - self._numbers[rank] / 2 for rank, top in self._tops.items()})


def _figure(heights: Sequence[int], shown: range) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes below each other, with the given number of rows each."""
    size = 0.9 + 0.75 * len(shown), 0.5 * sum(heights) + 0.7 * len(heights) + 0.3
    figure = Figure(figsize=size, layout="constrained")
    return figure, [*figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]]


def _cell(axis: Axes, slot: int, action: Action, is_followed: bool) -> None:
    """Draw a forward or backward, in colour if it is followed."""
    fill, ink = (COLOURS[0], "white") if is_followed else (_GREY, "black")
    axis.add_patch(Rectangle((slot + 0.04, action.rank + 0.2), 0.92, 0.6, facecolor=fill, edgecolor="none"))
    axis.text(slot + 0.5, action.rank + 0.5, action.label, fontsize=6.5, ha="center", va="center", color=ink)


def _arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.add_patch(
        FancyArrowPatch(
            start, end, color=_LINE, zorder=3, arrowstyle="-|>", mutation_scale=9, linewidth=0.9, shrinkA=0, shrinkB=0
        )
    )


def _bars(axis: Axes, rows: _Rows, shown: range, colour: Callable[[Value], int]) -> None:
    """Draw a bar for each life, with the name of its value at its beginning or, if later, that of the picture."""
    for life in rows.lives:
        begin, end, bottom = max(life.begin, shown.start), min(life.end, shown.stop), rows.bottom(life)
        fill = COLOURS[colour(life.value) % len(COLOURS)]
        box = Rectangle((begin, bottom + 0.06), end - begin, 0.88, facecolor=fill, edgecolor=_LINE, alpha=0.45)
        axis.add_patch(box)
        axis.text(begin + 0.06, bottom + 0.7, str(life.value), fontsize=7, va="center")


def _dress(axis: Axes, title: str, shown: range, ranks: Mapping[int, float]) -> None:
    """Name the ranks and slots."""
    axis.set(xlim=(shown.start, shown.stop))
    axis.set_title(title, fontsize=9)
    axis.set_yticks([*ranks.values()], [f"rank {rank}" for rank in ranks], fontsize=8)
    axis.set_xticks([slot + 0.5 for slot in shown], [str(slot) for slot in shown], fontsize=8)
    for slot in shown:
        axis.axvline(slot, color="#DDDDDD", linewidth=0.5, zorder=0)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
