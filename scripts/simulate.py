"""Simulate every setting of the cost table with many workers; write results/simulated.json.

Usage: python scripts/simulate.py [N ...]

Without N: 8 16 32 64 128 256, minutes on two cores; four times as long for twice N, so that 512 and 1024 take about an
hour. Equal stages; the very programs that would run. `cdp-report build` compares the numbers with the closed forms.
What is in the file stays: remove it to simulate all anew. Each setting is written when it is done.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from cdp_repro.cli.console import run_script
from cdp_repro.config import ConfigError
from cdp_repro.observe.versions import versions
from cdp_repro.predict.closed_forms import Setting, Values
from cdp_repro.predict.steady_state import simulated, unit_costs
from cdp_repro.report.cost_table import SIMULATED, simulation_key
from cdp_repro.studies.cost_settings import SETTINGS

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = (8, 16, 32, 64, 128, 256)


def main(arguments: list[str]) -> None:
    sizes = [_workers(text) for text in arguments]
    path, said = RESULTS / SIMULATED, {"command": "python scripts/simulate.py", **versions()}
    values = json.loads(path.read_text())["values"] if path.exists() else {}
    ours = [setting for setting in SETTINGS if setting.baseline is None]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for workers in sizes or WORKERS:
            present = values.setdefault(str(workers), {})
            missing = [setting for setting in ours if simulation_key(setting) not in present]
            for setting, found in zip(missing, pool.map(partial(_simulated, workers), missing), strict=True):
                present[simulation_key(setting)] = found
                path.write_text(json.dumps({**said, "values": _ordered(values, ours)}, indent=1) + "\n")


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 2):
        raise ConfigError([f"N={text}: give whole numbers of workers, 2 or more, e.g. 8"])
    return int(text)


def _ordered(values: dict[str, dict[str, Values]], settings: list[Setting]) -> dict[str, dict[str, Values]]:
    keys = list(map(simulation_key, settings))
    return {n: {key: values[n][key] for key in keys if key in values[n]} for n in sorted(values, key=int)}


def _simulated(workers: int, setting: Setting) -> Values:
    found = simulated(setting, workers, unit_costs(workers), optimizer_states=1)
    print(workers, setting.name, setting.mode, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
