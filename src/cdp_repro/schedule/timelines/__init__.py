"""Timelines: one file per family, with a picture of each."""

from cdp_repro.schedule.by_name import ByName, is_subclass_of
from cdp_repro.schedule.timelines.clocked import Clocked
from cdp_repro.schedule.timelines.cyclic import Cyclic
from cdp_repro.schedule.timelines.ordered import (
    Chimera,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    ZeroBubble,
)
from cdp_repro.schedule.timelines.sequential import Sequential
from cdp_repro.schedule.timelines.simultaneous import Simultaneous
from cdp_repro.schedule.timelines.timeline import Straight, Timeline

__all__ = ["TIMELINES", "Straight", "Timeline", "add_timeline"]

TIMELINES: ByName[type[Timeline]] = ByName(
    "timelines",
    {
        timeline.name: timeline
        for timeline in (
            Simultaneous,
            Sequential,
            Cyclic,
            GPipe,
            OneForwardOneBackward,
            Interleaved,
            ZeroBubble,
            Chimera,
            Clocked,
        )
    },
    is_subclass_of(Timeline),
    "a subclass of Timeline",
)


def add_timeline(timeline: type[Timeline]) -> None:
    """Enter a timeline under its name, for modes to use."""
    TIMELINES[timeline.name] = timeline
