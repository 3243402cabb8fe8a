"""`cdp-verify`: prove on this machine that a placement computes what one device computes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cdp_repro.cli.console import console_logging, exit_code_of, help_text, split_flags
from cdp_repro.cli.streams import command, write_error, write_out
from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.program_file import with_header_of_program
from cdp_repro.training.equivalence import Comparison, verify

USAGE = """usage: cdp-verify [--steps=8] [key=value ...]

Train a few steps in float64 on the placement and on one device, with a drain in the middle, and compare losses,
parameters of every version, optimizer state and buffers. Exit code 0 if they agree, 1 if not.

  cdp-verify mode=cdp_v2 placement=pipeline workers=2
  cdp-verify mode=cdp_v1 placement=zero workers=3 batch_size=48
  cdp-verify mode=dp baseline=ddp workers=2        a library's data parallelism against ours
  cdp-verify program=FILE                          a program that cdp-plan has written, edited by hand or not
"""
_STEPS = "--steps="


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 if all agrees, 1 if not, 2 for the user's mistakes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    steps = [text.removeprefix(_STEPS) for text in arguments if text.startswith(_STEPS)]
    flags, overrides, unknown = split_flags([a for a in arguments if not a.startswith(_STEPS)], ("--help", "-h"))
    if unknown:
        write_error(f"unknown option {unknown[0]}\n\n{USAGE}")
        return 2
    if flags:
        write_out(help_text(USAGE))
        return 0
    console_logging()
    with exit_code_of() as result:
        config = compose_config(["precision=fp64", *with_header_of_program(overrides)])
        comparison = verify(config, _number(steps[-1] if steps else "8"))
        write_out(_text(config, comparison))
        result.code = 0 if comparison.agrees else 1
    return result.code


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise ConfigError([f"--steps={text}: give a whole number of training steps, 2 or more, such as --steps=8"])
    return int(text)


def _text(config: RunConfig, comparison: Comparison) -> str:
    against = config.baseline or f"placement {config.placement.name}"
    lines = [
        f"{config.model.name} on {config.dataset.name}, mode {config.mode.name}, {against} in {comparison.ranks} "
        f"processes against one device, {comparison.steps} training steps, {config.precision}",
        "",
        "largest difference, over the largest value",
        f"  losses    {comparison.losses:.1e}",
        *(f"  stage {stage:<4}{difference:.1e}" for stage, difference in enumerate(comparison.stages)),
        "",
    ]
    limit = "bitwise" if comparison.tolerance == 0 else f"within {comparison.tolerance:.0e}"
    lines.append(f"they agree {limit}" if comparison.agrees else f"they do NOT agree {limit}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
