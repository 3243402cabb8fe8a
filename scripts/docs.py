"""Draw the pictures of docs/ again, from the programs that they show.

Usage: python scripts/docs.py [folder]          default: docs/figures
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from cdp_repro.cli.console import made_folder, run_script
from cdp_repro.cli.streams import write_out
from cdp_repro.observe.dataflow_figures import gradient_sum_figure, micro_batch_figure, versions_figure
from cdp_repro.observe.figures import save_figure
from cdp_repro.schedule import Program, Schedule

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"


def figures() -> dict[str, Figure]:
    """Return each picture by the name of its file."""
    replicated, pipeline = (Program(Schedule.build("cdp_v2", 3, 3, place)) for place in ("replicated", "pipeline"))
    both = {"cdp_v2, N = S = 3, replicated": replicated, "cdp_v2, N = S = 3, pipeline": pipeline}
    return {
        "micro_batch.svg": micro_batch_figure(both, micro_batch=4, shown=range(7, 17)),
        "gradient_sum.svg": gradient_sum_figure(replicated, stage=2, version=2, shown=range(9, 19)),
        "versions.svg": versions_figure(both, stage=1, shown=range(6, 18)),
    }


def draw(folder: Path) -> list[Path]:
    """Write all pictures; return their paths."""
    written = []
    for name, figure in figures().items():
        save_figure(figure, folder / name)
        written.append(folder / name)
    return written


def main(arguments: list[str]) -> None:
    for path in draw(made_folder(arguments, FOLDER)):
        write_out(f"{path}\n")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
