"""Modes: a timeline with a rule, under a name of the literature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cdp_repro.schedule.by_name import ByName
from cdp_repro.schedule.rules import Clock, Fresh, Freshest, NoStashing, Rule, UniformDelay
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines import TIMELINES, Timeline

OF_CLOCKS = ("speeds", "jitter", "message_time")
"""Sizes of modes whose workers run on clocks of their own."""
MODE_SIZES = (*OF_CLOCKS, "slack", "slices")
"""Sizes that only some modes have."""
DEFAULT_SLACK, DEFAULT_SLICES = 3, 2


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

    def __post_init__(self) -> None:
        if not callable(self.rule):
            raise ValueError(
                f"the rule of a mode is {self.rule!r}: give what makes it from the sizes, such as its class"
            )

    @property
    def timeline_class(self) -> type[Timeline]:
        """The timeline of the name; raise ValueError if there is none."""
        if self.timeline not in TIMELINES:
            raise ValueError(
                f"the mode has the timeline {self.timeline!r}, which nobody has entered: call add_timeline first"
            )
        return TIMELINES[self.timeline]

    @property
    def has_own_clocks(self) -> bool:
        """Whether workers run on clocks of their own, and each micro-batch is an update."""
        return self.timeline_class.has_own_clocks

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
        "terapipe": Mode("gpipe", Fresh, sizes=("slices",)),
        "chimera": Mode("chimera", Fresh),
        "pipedream": Mode("cyclic", Freshest, updates_each=True),
        "pipedream_2bw": Mode("cyclic", UniformDelay),
        "ampnet": Mode("cyclic", NoStashing, updates_each=True),
        "ssp": Mode("clocked", Clock, sizes=(*OF_CLOCKS, "slack")),
        "async": Mode("clocked", Clock, sizes=OF_CLOCKS),
    },
    lambda found: isinstance(found, Mode),
    "a Mode",
)
"""By name, the paper's first. Some modes are the same under the names of two literatures."""


def add_mode(
    name: str, timeline: str, rule: Callable[[Sizes], Rule], updates_each: bool = False, sizes: tuple[str, ...] = ()
) -> None:
    """Enter a mode: the name of a timeline, with a rule that is made from the sizes; see `Mode`."""
    MODES[name] = Mode(timeline, rule, updates_each, sizes)
