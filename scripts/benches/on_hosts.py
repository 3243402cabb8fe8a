"""Runs a module of the benches as ranks, each on a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from two_hosts import Host

SCRIPTS = Path(__file__).parents[1]


def run_on_hosts(hosts: Sequence[Host], module: str, arguments: Sequence[str]) -> Any:
    """Run `python -m MODULE ARGUMENTS FILE` on each host, with one thread; return the JSON that rank 0 writes to FILE.

    Raises:
        RuntimeError: a rank has failed.
    """
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(len(hosts))}
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory() as folder:
        written = Path(folder, "rank_0.json")
        ranks = [
            subprocess.Popen(
                host.command(sys.executable, "-m", module, *arguments, str(written)),
                env={**os.environ, **meeting, "PYTHONPATH": path, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate(hosts)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"a rank of {module} {' '.join(arguments)} failed; its error stands above")
        return json.loads(written.read_text())
