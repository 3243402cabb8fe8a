"""Simulate every setting of the cost table with many workers; write results/simulated.json.

Usage: python scripts/simulate.py [N ...]

Without N: 8 16 32 64 128 256, minutes on two cores; four times as long for twice N, so that 512 and 1024 take about an
hour. Equal stages; the very programs that would run. `cdp-report build` compares the numbers with the closed forms.
What is in the file stays, with the versions that gave it: remove it to simulate all anew. Each setting is written when
it is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cdp_repro.cli.console import run_script
from cdp_repro.config import ConfigError
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.versions import versions
from cdp_repro.predict.closed_forms import Setting, Values
from cdp_repro.predict.steady_state import simulated, unit_costs
from cdp_repro.report.cost_table import SIMULATED, simulation_key, simulations_of
from cdp_repro.studies.cost_settings import SETTINGS

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = (8, 16, 32, 64, 128, 256)


def main(arguments: list[str]) -> None:
    sizes = [_workers(text) for text in arguments]
    path, said = RESULTS / SIMULATED, {"command": "python scripts/simulate.py", **versions()}
    parts = json.loads(path.read_text())["parts"] if path.exists() else []
    own = _part_of(parts, said)
    ours = [setting for setting in SETTINGS if setting.baseline is None]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for workers in sizes or WORKERS:
            present = simulations_of(parts).get(str(workers), {})
            missing = [setting for setting in ours if simulation_key(setting) not in present]
            for setting, found in zip(missing, pool.map(partial(_simulated, workers), missing), strict=True):
                own["values"].setdefault(str(workers), {})[simulation_key(setting)] = found
                replace_file(path, f"{json.dumps({'parts': parts}, indent=1)}\n".encode())


def _part_of(parts: list[dict[str, Any]], said: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of results that this command and these versions gave; unless there is one, add it."""
    for part in parts:
        if {**part, **said} == part:
            return part
    parts.append({**said, "values": {}})
    return parts[-1]


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 2):
        raise ConfigError([f"N={text}: give whole numbers of workers, 2 or more, e.g. 8"])
    return int(text)


def _simulated(workers: int, setting: Setting) -> Values:
    found = simulated(setting, workers, unit_costs(workers), optimizer_states=1)
    print(workers, setting.name, setting.mode, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
