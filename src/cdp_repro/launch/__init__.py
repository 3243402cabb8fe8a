"""Processes: the ranks of a run, however they were started, and the process group that joins them.

`launcher` runs a function in every rank, `starters` reads what torchrun and srun say, `local_ranks` starts processes
here, `process_group` joins them, `signals` turns SIGTERM into a request, `positions` says where each
rank stands. Only `process_group` imports torch.
"""

from cdp_repro.launch.failures import LaunchError, RankFailedError, StalledError
from cdp_repro.launch.launcher import launch

__all__ = ["LaunchError", "RankFailedError", "StalledError", "launch"]
