"""Runs a function in real processes, each a rank of a gloo group: for the tests of everything distributed."""

from __future__ import annotations

import io
import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PRELOADED = [
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.pipelining", "torchvision", "timm",
    "sklearn.datasets", "pytest", "hypothesis", "cdp_repro", "cdp_repro.training.run",
]  # fmt: skip
"""A fork server imports these once, so that a rank starts in a fraction of a second: what ranks call lies in modules of
tests, which import pytest and hypothesis."""


def run_ranks(
    function, ranks, *arguments, folder: Path, joins: bool = False, seconds: float = 120, patience: float = 1800
):
    """Return what `function(*arguments)` returns on each rank, by rank; fail with the first traceback.

    With `joins` the function joins the process group itself, as a rank that `launch` has started does. A rank waits
    `patience` seconds for another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if joins and ranks > 1 else None
    store = server.port if server else f"file://{folder}/store-{os.getpid()}-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_rank, args=(function, arguments, rank, ranks, store, queue, patience), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results = {}
    try:
        while len(results) < ranks:
            rank, result, failure = queue.get(timeout=seconds)
            if rank in results:  # at the barrier below, which others may not reach in time
                continue
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = torch.load(io.BytesIO(result), weights_only=False)
    finally:
        for process in processes:
            process.join(5 if len(results) == ranks else 0)
            process.kill()
    return [results[rank] for rank in range(ranks)]


def _rank(function, arguments, rank, ranks, store, queue, patience):
    torch.set_num_threads(1)
    joins = isinstance(store, int)
    if joins:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(store), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        if ranks > 1 and not joins:
            timeout = timedelta(seconds=patience)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
        saved = io.BytesIO()  # whole, not by shared memory, which ends with this process
        torch.save(function(*arguments), saved)
        queue.put((rank, saved.getvalue(), None))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
