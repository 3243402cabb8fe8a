"""One run of a sweep, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from cdp_repro.launch.signals import StopRequest


def train_in_process(
    arguments: Sequence[str],
    stop: StopRequest,
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    held: Sequence[IO[bytes]] = (),
) -> int:
    """Run `cdp-train` in a process of its own; pass a signal on once, and wait for the checkpoint.

    Args:
        arguments: The arguments of `cdp-train`.
        stop: Holds the signal that this process received, if any.
        environment: Variables to add to those of this process.
        log: Receives what it prints; by default that goes where this process prints.
        held: Open files that it also keeps open until it ends, and with them their locks.

    Returns:
        Its exit code; -k if signal k killed it.
    """
    command = [sys.executable, "-m", "cdp_repro.cli.train", *arguments]
    errors = None if log is None else subprocess.STDOUT
    passed_on = False
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=log,
        stderr=errors,
        pass_fds=[file.fileno() for file in held],
        start_new_session=True,  # else Ctrl-C would reach it twice, and the second one would end it at once
    ) as process:
        while process.poll() is None:
            if stop.signal is not None and not passed_on:
                process.send_signal(stop.signal)
                passed_on = True
            time.sleep(0.05)
    return process.returncode
