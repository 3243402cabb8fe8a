"""The console commands. They import what they need only when they run, so that Ctrl-C meanwhile ends them quietly."""

from __future__ import annotations

import os
from importlib import import_module
from typing import NoReturn

from cdp_repro.cli.streams import write_error


def train() -> int:
    """Run `cdp-train`."""
    return _run("cdp_repro.cli.train")


def plan() -> NoReturn:
    """Run `cdp-plan`, then exit without cleanup: a plan leaves nothing open, and unloading torch takes a second."""
    os._exit(_run("cdp_repro.cli.plan"))


def verify() -> int:
    """Run `cdp-verify`."""
    return _run("cdp_repro.cli.verify")


def export() -> int:
    """Run `cdp-export`."""
    return _run("cdp_repro.cli.export")


def report() -> int:
    """Run `cdp-report`."""
    return _run("cdp_repro.cli.report")


def _run(module: str) -> int:
    try:
        return int(import_module(module).main())
    except KeyboardInterrupt:
        write_error("interrupted\n")
        return 130
