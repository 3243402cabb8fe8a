"""Processes: the ranks of a run, however they were started, and the process group that joins them.

`launcher` runs a function in every rank. `starters` reads the variables of torchrun and srun. `local_ranks` starts
ranks here, forked by `fork_server`. `process_group` joins them. `signals` turns SIGTERM into a request. `positions`
says where each rank stands. `team` is the ranks of a run, `control_messages` what they tell each other. The last two
and `process_group` import torch when they are imported; `launcher` and the modules that start ranks do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdp_repro.launch.failures import LaunchError, RankFailedError, StalledError
    from cdp_repro.launch.launcher import launch
    from cdp_repro.launch.starters import is_rank_0, refuse_several

__all__ = ["LaunchError", "RankFailedError", "StalledError", "is_rank_0", "launch", "refuse_several"]

_MODULES = {
    **dict.fromkeys(("LaunchError", "RankFailedError", "StalledError"), "failures"),
    "launch": "launcher",
    **dict.fromkeys(("is_rank_0", "refuse_several"), "starters"),
}
"""Where each name is defined. Commands import this package before they can be interrupted in words of their own."""


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
