"""Measure overhead, methods against delay, programs, placements, pipelines, servers and links.

Usage: python scripts/bench.py [overhead] [methods] [programs] [placements] [pipelines] [servers]
                                [links_resnet18] [links_vit]

Writes results/bench/*.json.

Without names: all. Servers and links are between network namespaces, which takes root.

Contenders are timed in turns, in alternating rounds in the same process, or in the same ranks, and reported as ratios
with their spread. `servers` starts its ranks anew for each number of servers in each round, and compares them within a
round. `programs` reports the CPU seconds of single programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benches.links import NETWORKS, links
from benches.methods import methods
from benches.overhead import overhead
from benches.pipelines import pipelines
from benches.placements import placements
from benches.programs import programs
from benches.servers import servers
from benches.tables import RESULTS, draw_links, link_curves
from cdp_repro.cli.console import run_script
from cdp_repro.config.errors import nearest, refuse
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.figures import save_figure
from cdp_repro.observe.versions import versions


def main(names: list[str]) -> None:
    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "overhead": overhead, "methods": methods, "programs": programs, "placements": placements,
        "pipelines": pipelines, "servers": servers,
        **{name: partial(links, name) for name in NETWORKS},
    }  # fmt: skip
    refuse(
        f"unknown bench {name!r}: choose {', '.join(benches)}{nearest(name, benches)}"
        for name in names
        if name not in benches
    )
    made_by = versions()  # before the first result is written, with which the tree has changes
    for name in names or benches:
        result = {"command": f"python scripts/bench.py {name}", **made_by, **benches[name]()}
        RESULTS.mkdir(parents=True, exist_ok=True)
        replace_file(RESULTS / f"{name}.json", f"{json.dumps(result, indent=2)}\n".encode())
        if name in NETWORKS:
            save_figure(draw_links(link_curves()), RESULTS / "links.svg")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
