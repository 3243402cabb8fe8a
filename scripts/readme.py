"""Refresh the README and the pages of docs/: pictures, the output below each command line, tables of measurements.

Usage: python scripts/readme.py [folder]

Commands run in `folder` (default: a new temporary one), the README's first: those of docs/ go on from its runs. Those
whose data is not in `folder`/data keep their output.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benches.tables import tables
from cdp_repro.cli.console import only_folder, run_script
from cdp_repro.config import ConfigError
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.figures import save_figure, timeline_figure
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.lanes import Lanes

ROOT = Path(__file__).parents[1]
WITH_COMMANDS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("commands", "placements", "systems")))
"""In the order in which their commands run."""
WITH_TABLES = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)


def blocks(document: str) -> Iterator[tuple[str, str]]:
    """Yield (command line, output) of every console block."""
    for match in BLOCK.finditer(document):
        yield match["command"], match["output"]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of a document, with the commands of this environment."""
    bin_folder = Path(sys.executable).parent
    return subprocess.run(
        f"export PATH={bin_folder}:$PATH; {command}",
        shell=True,
        executable="/bin/bash",
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def draw_timeline() -> None:
    """Draw the picture at the top of the README."""
    timelines = {mode: Program(Schedule.build(mode, 3)).slots(2) for mode in ("dp", "cdp_v1", "cdp_v2")}
    save_figure(
        timeline_figure(timelines, dict.fromkeys(timelines, Lanes(3)), stages=3),
        ROOT / "results" / "figures" / "timeline.svg",
    )


def with_outputs(text: str, folder: Path) -> str:
    """Return a document with what its commands print now."""

    def with_output(match: re.Match[str]) -> str:
        command = match["command"]
        if "dataset=cifar10" in command and not (folder / "data").exists():
            return match[0]
        ran = run(command, folder)
        if ran.returncode:
            raise ConfigError([f"{command} ended with exit code {ran.returncode}:\n{ran.stdout}"])
        output = ran.stdout.replace(str(folder.resolve()), "/home/you").strip("\n")
        return f"```console\n$ {command}\n{output}\n```"

    return BLOCK.sub(with_output, text)


def with_tables(text: str) -> str:
    """Return a document with the measurements as they are now."""
    before, _, rest = text.partition("<!-- bench -->")
    after = rest.partition("<!-- /bench -->")[2]
    return f"{before}<!-- bench -->\n{tables()}\n<!-- /bench -->{after}"


def refresh(folder: Path) -> None:
    for path in WITH_COMMANDS:
        replace_file(path, with_outputs(path.read_text(), folder).encode())
    replace_file(WITH_TABLES, with_tables(WITH_TABLES.read_text()).encode())
    draw_timeline()


def main(arguments: list[str]) -> None:
    folder = only_folder(arguments)
    if folder is not None and not folder.exists():
        raise ConfigError([f"there is no folder {folder}: make it, or leave it out"])
    refresh(folder or Path(tempfile.mkdtemp()))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, main, sys.argv[1:]))
