"""The console commands: import what they need only when they run, so that Ctrl-C in between ends them quietly."""

from __future__ import annotations

import sys


def train() -> int:
    """Run `cdp-train`."""
    try:
        from cdp_repro.cli.train import main

        return main()
    except KeyboardInterrupt:
        return _interrupted()


def plan() -> int:
    """Run `cdp-plan`."""
    try:
        from cdp_repro.cli.plan import main

        return main()
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return 130
