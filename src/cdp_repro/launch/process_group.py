"""The process group of a rank: torch.distributed from its environment, and a check that all ranks run the same."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cdp_repro.launch import control_messages
from cdp_repro.launch.failures import LaunchError

_GLOO_LACKS_PEERS = "Gloo connectFullMesh failed"
_NAME_SECONDS = 10.0
"""How long a name may stay unknown: its machine may be starting at the same time."""


@contextmanager
def process_group(device: torch.device, processes: int, timeout_seconds: float) -> Iterator[None]:
    """Join the process group that the environment describes: gloo on a CPU, NCCL on GPUs, one of which each rank gets.

    A single process without a number (no RANK) needs no group and gets none.

    Args:
        device: Its type decides between gloo and NCCL.
        processes: The number of ranks.
        timeout_seconds: How long to wait for the other ranks, now and in each message.

    Raises:
        LaunchError: This machine has too few GPUs, or the ranks do not find each other.
    """
    if processes == 1 and "RANK" not in os.environ:
        yield
        return
    address = _address(timeout_seconds)
    _refuse_unknown_interfaces()
    gpu = _own_gpu() if device.type == "cuda" else None
    try:
        dist.init_process_group(
            "gloo" if gpu is None else "nccl", timeout=timedelta(seconds=timeout_seconds), device_id=gpu
        )
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and _GLOO_LACKS_PEERS not in str(error):
            raise
        raise LaunchError(_explanation(error, address, processes, timeout_seconds)) from error
    assert dist.get_world_size() == processes
    _limit_silence_of_the_store(timeout_seconds)
    _end_threads_before_python()
    try:
        yield
    except BaseException:
        if gpu is None:  # NCCL would wait here for ranks that wait for this one; the end of the process cleans up
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _limit_silence_of_the_store(seconds: float) -> None:
    """Make the kernel break the connection to the store after this long without an acknowledgement (Linux).

    torch sets no limit to its wait for the store's answer; if the network fails, that takes a quarter of an hour.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    folder = Path("/proc/self/fd")
    if option is None or not folder.is_dir():
        return
    port = int(os.environ["MASTER_PORT"])
    sockets = [int(path.name) for path in folder.iterdir() if path.is_socket()]
    for number in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # OSError: it is not connected
            if connection.type == socket.SOCK_STREAM and connection.getpeername()[1:2] == (port,):
                connection.setsockopt(socket.IPPROTO_TCP, option, round(min(1000 * seconds, 2**31 - 1)))


def _end_threads_before_python() -> None:
    """Make gloo's threads end while Python still runs; they end with the last reference to the group.

    Otherwise a reference cycle of the run's objects keeps the group until Python ends. A thread that then frees the
    tensor of its last broadcast, late because the cores are busy, waits for a lock that no longer exists, and aborts
    the process.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)


def _address(timeout_seconds: float) -> str:
    """Return the address at which the ranks meet; raise LaunchError if it cannot be one."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"RANK is set, but the environment of this rank lacks {', '.join(missing)}: start the processes with "
            "torchrun or srun, unset RANK for a run that starts its own, "
            "or set the address and a free port of rank 0's machine"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT={port!r} in the environment is no port: use a free one from 1024 to 65535")
    _wait_for_name(host, min(timeout_seconds, _NAME_SECONDS))
    return f"{host}:{port}"


def _wait_for_name(host: str, seconds: float) -> None:
    """Wait until a name resolves to an address; torch would try until its timeout, and show its C++ stack."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR={host!r} in the environment stands for no address ({error.strerror}): use the name "
                    "or address of rank 0's machine"
                ) from error
        time.sleep(0.2)


def _refuse_unknown_interfaces() -> None:
    """Raise LaunchError if gloo, which ranks with GPUs use, too, is to use a network interface that is not here."""
    given = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    known = _interfaces()
    if unknown := [name for name in given if name.partition(":")[0] not in known]:  # eth0:1 is an address of eth0
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME: this machine has no network interface {', '.join(unknown)}; use {', '.join(known)}, "
            "or unset it"
        )


def _interfaces() -> list[str]:
    """Return the names of the network interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def _own_gpu() -> torch.device:
    """Select the GPU of this rank and return it."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    gpus = torch.cuda.device_count()
    if gpus < local_ranks:
        raise LaunchError(
            f"device=cuda needs a GPU for each of the {local_ranks} processes on this machine, which has {gpus}: "
            f"use device=cpu{f', or workers= such that at most {gpus} processes run here' if gpus else ''}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _explanation(error: Exception, address: str, processes: int, timeout_seconds: float) -> str:
    if "EADDRINUSE" in str(error):
        return f"rank 0 cannot wait for the others at {address}, the port is in use: set MASTER_PORT to a free one"
    if _GLOO_LACKS_PEERS in str(error):
        names = ", ".join(_interfaces())
        return (
            f"rank {os.environ['RANK']} found the store at {address}, but does not reach the other ranks: look whether "
            "one has failed; if not, the name of a machine stands for an address that the others do not reach, such as "
            f"127.0.1.1: set GLOO_SOCKET_IFNAME on it to the network interface that they reach (here there are {names})"
        )
    if os.environ["RANK"] == "0":
        return (
            f"rank 0 waited {timeout_seconds:g} s at {address}, but not all of the {processes} processes came: "
            "start them all, with this MASTER_ADDR and MASTER_PORT, and look whether one has failed"
        )
    return (
        f"rank {os.environ['RANK']} got no answer from rank 0 at {address} for {timeout_seconds:g} s: "
        "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are those of its machine, and the firewall between"
    )


def refuse_differing(what: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare named hashes with those of rank 0; do nothing where there is only one process.

    `group` is a gloo group, needed if the default group is not one.

    Raises:
        LaunchError: A hash differs on some rank; all ranks raise it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gathered = control_messages.share(control_messages.gather(dict(what), group), group)
    names = sorted({name for hashes in gathered for name in hashes})
    ranks = {
        name: [rank for rank, hashes in enumerate(gathered) if hashes.get(name) != gathered[0].get(name)]
        for name in names
    }
    differing = [f"{name} on rank {', '.join(map(str, those))}" for name, those in ranks.items() if those]
    if differing:
        raise LaunchError(
            f"the processes do not run the same; other than on rank 0 are: {'; '.join(differing)}. "
            "Give every machine the same of it"
        )
