"""Runs a function in every rank: in processes started here, or in this one if torchrun or srun has started it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from cdp_repro.launch.environment import environment
from cdp_repro.launch.in_rank import end_with, first_parent
from cdp_repro.launch.local_ranks import launch_here
from cdp_repro.launch.starters import check_world_size, variables_of_starter


def launch(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    processes: int,
    grace_seconds: float = 20.0,
    imports: Sequence[str] = (),
) -> Any:
    """Run `function(*arguments)` in every one of `processes` ranks.

    Under torchrun or srun this process is one of the ranks and runs the function itself, as it does if it is the only
    rank. Otherwise the ranks are started here. SIGINT, SIGTERM and SIGHUP are then passed on to them once, and they end
    in their own way; a second SIGINT ends them. On Linux no rank outlives this process.

    Args:
        function: Must be defined at the top level of a module.
        arguments: Must be picklable.
        processes: The number of ranks.
        grace_seconds: How long ranks may go on after a signal, or after one has failed, before they are killed.
        imports: Modules that the ranks need; if ranks are started here, imported once before the fork.

    Returns:
        What rank 0 returned; under torchrun or srun what this rank returned.

    Raises:
        StalledError: Ranks have not ended within `grace_seconds` after a signal.
        LaunchError: torchrun or srun has started a different number of processes.
        RankFailedError: A rank has failed. The caller's own exceptions (those of its package and of this one),
            KeyboardInterrupt and SystemExit are raised unchanged instead, preferably those of rank 0.
    """
    started = variables_of_starter(os.environ)
    if started is not None:
        check_world_size(started, processes)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(first_parent())  # else a rank would outlive a killed torchrun
        with environment(started):
            return function(*arguments)
    if processes == 1:
        return function(*arguments)
    return launch_here(function, arguments, processes, grace_seconds, imports)
