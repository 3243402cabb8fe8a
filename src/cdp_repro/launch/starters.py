"""Ranks that torchrun or srun has started: their variables for torch.distributed, and a check of their number."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping

from cdp_repro.launch.failures import LaunchError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on, SLURM's numbers of steps mean the batch script, the shell of salloc, and the like."""
_UNSET = "torchrun and srun set it; unset it, and the processes are started here"


def variables_of_starter(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return this rank's variables for torch.distributed if torchrun or srun has set some, else None.

    Raises:
        LaunchError: one of them is not a number, or does not fit the others.
    """
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        _check_rank(environ, "RANK", "WORLD_SIZE")
        return {name: environ[name] for name in ("RANK", "WORLD_SIZE")}
    # A batch script has the first two as well, and the shell of salloc all three, but they run once.
    by_srun = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"} <= environ.keys()
    step = _number(environ, "SLURM_STEP_ID", missing="0") if by_srun else 0
    if by_srun and step < _FIRST_SPECIAL_STEP and _number(environ, "SLURM_NTASKS") > 1:
        _check_rank(environ, "SLURM_PROCID", "SLURM_NTASKS")
        job = _number(environ, "SLURM_JOB_ID", missing="0")
        return {
            "RANK": environ["SLURM_PROCID"],
            "LOCAL_RANK": "0" if _has_own_gpu(environ) else environ.get("SLURM_LOCALID", "0"),  # it chooses the GPU
            "WORLD_SIZE": environ["SLURM_NTASKS"],
            "MASTER_ADDR": environ.get("MASTER_ADDR", _first_host(environ["SLURM_STEP_NODELIST"])),
            "MASTER_PORT": environ.get("MASTER_PORT", str(20_000 + (8 * job + step) % 12_000)),  # below ephemeral ports
        }
    return None


def is_rank_0() -> bool:
    """Return whether this process is rank 0, or one that has started the ranks."""
    return (variables_of_starter(os.environ) or {}).get("RANK", "0") == "0"


def _number(environ: Mapping[str, str], name: str, missing: str | None = None) -> int:
    """Return a variable as a number, 0 or more."""
    text = environ[name] if missing is None else environ.get(name, missing)
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={text!r} in the environment is not a whole number, 0 or more: {_UNSET}")
    return int(text)


def _check_rank(environ: Mapping[str, str], rank: str, size: str) -> None:
    """Raise LaunchError unless the number of this rank is less than the number of ranks."""
    if _number(environ, rank) >= _number(environ, size):
        raise LaunchError(
            f"{rank}={environ[rank]} and {size}={environ[size]} in the environment do not fit: ranks count from 0 to "
            f"{size} - 1; {_UNSET}"
        )


def _has_own_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM shows this task only one of several GPUs, as it does for `--gpus-per-task=1`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible != "" and "," not in visible and _number(environ, "SLURM_GPUS_ON_NODE", missing="0") > 1


def _first_host(node_list: str) -> str:
    """Return the first host of a list such as `gpu[01-03,7],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={node_list} names no host: set MASTER_ADDR to that of rank 0")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def check_world_size(started: Mapping[str, str], processes: int) -> None:
    """Raise LaunchError, with a command that works, unless the starter made as many ranks as the run needs."""
    if int(started["WORLD_SIZE"]) == processes:
        return
    if "RANK" in os.environ:
        works = (
            f"torchrun --nproc-per-node={processes} {shlex.join(_own_command())}\n"
            "or unset RANK and WORLD_SIZE, and the processes are started here"
        )
    else:
        works = f"srun --ntasks={processes} {shlex.join(sys.orig_argv)}"
    raise LaunchError(f"{_started_text(started)}, but the run needs {processes}: use\n{works}")


def refuse_several(each_would: str) -> None:
    """Raise LaunchError if torchrun or srun has started several processes for what one does, such as "train it all"."""
    started = variables_of_starter(os.environ)
    if started and int(started["WORLD_SIZE"]) > 1:
        raise LaunchError(
            f"{_started_text(started)}, and each would {each_would}: start one, without torchrun or srun; a run starts "
            "its ranks itself"
        )


def _started_text(started: Mapping[str, str]) -> str:
    """Say how many processes the starter has started, and which variable says so."""
    counted = "WORLD_SIZE" if "RANK" in os.environ else "SLURM_NTASKS"
    return f"{started['WORLD_SIZE']} processes have been started ({counted})"


def _own_command() -> list[str]:
    """Return the command of this process in the form of torchrun: `-m MODULE ARGUMENT...` or `SCRIPT ARGUMENT...`.

    Python notes the module of `-m` in the `__spec__` of `__main__`; a script has none.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name, *sys.argv[1:]] if spec else list(sys.argv)
