"""Timelines: one file for each family, with its grid."""

from cdp_repro.schedule.timelines.clocked import Clocked
from cdp_repro.schedule.timelines.cyclic import Cyclic
from cdp_repro.schedule.timelines.flushing import Flushing, GPipe, OneForwardOneBackward, TeraPipe
from cdp_repro.schedule.timelines.ordered import Chimera, Interleaved, Ordered, ZeroBubble
from cdp_repro.schedule.timelines.sequential import Sequential
from cdp_repro.schedule.timelines.simultaneous import Simultaneous
from cdp_repro.schedule.timelines.timeline import Timeline

__all__ = [
    "Chimera",
    "Clocked",
    "Cyclic",
    "Flushing",
    "GPipe",
    "Interleaved",
    "OneForwardOneBackward",
    "Ordered",
    "Sequential",
    "Simultaneous",
    "TeraPipe",
    "Timeline",
    "ZeroBubble",
]
