"""`cdp-verify`: checks on this machine that a placement computes what one device computes."""

from __future__ import annotations

import logging

from cdp_repro.cli.command_line import Command, CommandLine
from cdp_repro.cli.console import console_logging
from cdp_repro.cli.entry import end_with
from cdp_repro.cli.streams import command, write_out
from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.loading import without_effect_on_steps
from cdp_repro.config.program_file import with_header_of_program
from cdp_repro.launch import is_rank_0
from cdp_repro.observe.text import several
from cdp_repro.training.equivalence import Comparison, verify

logger = logging.getLogger("cdp_repro")

USAGE = """usage: cdp-verify [--steps=8] [key=value ...]

Train a few steps in float64 on the placement and on one device, with a drain
in the middle, and compare losses, parameters of every version, optimizer state
and buffers. Exit code 0 if they agree, 1 if not.

  cdp-verify mode=cdp_v2 placement=pipeline workers=2
  cdp-verify mode=cdp_v1 placement=zero workers=3 batch_size=48
  cdp-verify mode=dp baseline=ddp workers=2   a library's DP against ours
  cdp-verify program=FILE          a program of cdp-plan, edited by hand or not
"""


def _run(line: CommandLine) -> int:
    """Return the exit code: 0 if everything agrees, 1 if not."""
    console_logging()
    config = compose_config(["precision=fp64", *with_header_of_program(line.overrides)], source=line.source)
    steps = _number(line.options.get("steps", "8"))
    if config.placement.name == "single_device" and config.baseline is None and config.program is None:
        raise ConfigError(
            ["placement=single_device would be compared with itself: give a placement of several ranks, such as "
             "placement=replicated, or baseline=ddp mode=dp, or program=FILE"]
        )  # fmt: skip
    if is_rank_0():
        for sentence in without_effect_on_steps(config):
            logger.warning("warning: %s", sentence)
    comparison = verify(config, steps)
    if comparison is None:  # rank 0 of torchrun or srun tells
        return 0
    write_out(_text(config, comparison))
    return 0 if comparison.agrees else 1


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError([f"--steps={text}: give a whole number of training steps, 2 or more, such as --steps=8"])
    return int(text)


def _text(config: RunConfig, comparison: Comparison) -> str:
    against = config.baseline or f"placement {config.placement.name}"
    lines = [
        f"{config.model.name} on {config.dataset.name}, mode {config.mode.name}, {against} in {comparison.ranks} "
        f"process{'es' if comparison.ranks > 1 else ''} against one device, {comparison.steps} training steps, "
        f"{config.precision}{f', dropout {comparison.dropout:g}' if comparison.dropout else ''}",
        "",
        "largest difference, over the largest value",
        f"  losses    {comparison.losses:.1e}",
        *(f"  stage {stage:<4}{difference:.1e}" for stage, difference in enumerate(comparison.stages)),
        *([f"  other than on the first rank that has it: {several(comparison.copies)}"] if comparison.copies else []),
        "",
    ]
    limit = "bitwise" if comparison.tolerance == 0 else f"within {comparison.tolerance:.0e}"
    lines.append(f"they agree {limit}" if comparison.agrees else f"they do NOT agree {limit}")
    return "\n".join(lines) + "\n"


COMMAND = Command("cdp-verify", USAGE, _run, options=("steps",))
main = command(COMMAND.main)

if __name__ == "__main__":
    end_with(main)
