"""`cdp-plan`: what a run will do, before anything is spent."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cdp_repro.cli.common import exit_code_of, help_text, split_flags, write_out
from cdp_repro.cli.compose import compose_config
from cdp_repro.config import ConfigError
from cdp_repro.plan import make_plan, plan_text, write_plan

USAGE = """usage: cdp-plan [--out=FOLDER] [key=value ...]

Show the timeline, the stage cuts and the activation memory of the run that `cdp-train` with the same
values would make, beside data parallelism. Needs no data, and computes nothing: seconds for any network.

  cdp-plan mode=cdp_v2 workers=3
  cdp-plan dataset=imagenet model=resnet50 partition=activations slot_order=backward_first
  cdp-plan mode=cdp_v1 --out=plan                  also as SVG, PNG, CSV and Perfetto traces in plan/
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for the user's mistakes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    folder = [text.removeprefix("--out=") for text in arguments if text.startswith("--out=")]
    rest = [text for text in arguments if not text.startswith("--out=")]
    flags, overrides, unknown = split_flags(rest, ("--help", "-h"))
    if unknown:
        sys.stderr.write(f"unknown option {unknown[0]}\n\n{USAGE}")
        return 2
    if flags:
        sys.stdout.write(help_text(USAGE))
        return 0
    with exit_code_of() as result:
        if "" in folder:
            raise ConfigError(["--out= names no folder: give --out=FOLDER"])
        config = compose_config(overrides, check_device=False)
        plan = make_plan(config)
        write_out(plan_text(plan, shutil.get_terminal_size((120, 24)).columns))
        if folder:
            try:
                written = write_plan(plan, Path(folder[-1]))
            except OSError as error:
                raise ConfigError([f"--out={folder[-1]}: cannot write there: {error.strerror}"]) from error
            write_out("\nwritten: " + " ".join(map(str, written)) + "\n")
        result.code = 0
    return result.code


if __name__ == "__main__":
    sys.exit(main())
