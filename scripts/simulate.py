"""Simulate every setting of the cost table with many workers; write results/simulated.json.

Usage: python scripts/simulate.py [N ...]        (default: 8 16 32 64 128 256, minutes; four times as long for twice N)

Equal stages; the very programs that would run. `cdp-report build` compares the numbers with the closed forms. What is
in the file for other N stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cdp_repro.report.closed_forms import SETTINGS
from cdp_repro.report.costs import SIMULATED, simulated, simulation_key, unit_costs
from cdp_repro.training.run import versions

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = (8, 16, 32, 64, 128, 256)


def main(sizes: list[int]) -> None:
    path = RESULTS / SIMULATED
    values = json.loads(path.read_text())["values"] if path.exists() else {}
    for workers in sizes or WORKERS:
        values[str(workers)] = {}
        for setting in SETTINGS:
            if setting.baseline is None:
                found = simulated(setting, workers, unit_costs(workers), optimizer_states=1)
                values[str(workers)][simulation_key(setting)] = found
                print(workers, setting.name, setting.mode, flush=True)
        said = {"command": "python scripts/simulate.py", **versions()}
        ordered = {n: values[n] for n in sorted(values, key=int)}
        path.write_text(json.dumps({**said, "values": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
