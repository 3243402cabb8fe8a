"""`cdp-export`: writes the weights of a run to a file that torchvision, timm or transformers can load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cdp_repro.cli.console import exit_code_of
from cdp_repro.cli.entry import end_with
from cdp_repro.cli.streams import command, write_out
from cdp_repro.config import ConfigError
from cdp_repro.config.paths import typed_path

USAGE = """usage: cdp-export RUN_DIRECTORY FILE

Write the weights of a run's newest checkpoint to FILE (.safetensors or .pt):
the parameters after its last training step and BatchNorm's statistics, averaged
over the workers, under the names of the model's original: torchvision's, timm's
or transformers'. A run can start from them:

  cdp-export runs/my-run resnet18.safetensors
  cdp-train model=resnet18 model.weights=resnet18.safetensors
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for the user's mistakes."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"--help", "-h"} & set(arguments):
        write_out(USAGE)
        return 0
    with exit_code_of() as result:
        if len(arguments) != 2 or any(text.startswith("-") for text in arguments):
            raise ConfigError([f"cdp-export takes a run directory and a file, not {' '.join(arguments) or 'nothing'}"])
        from cdp_repro.training.weights import export  # here: torch takes seconds

        run_dir, path = (Path(typed_path(text)) for text in arguments)
        done = export(run_dir, path)
        write_out(
            f"{path}: {done.model} after {done.step} training steps, "
            f"{done.values:,} numbers in {done.tensors} tensors\n"
        )
        result.code = 0
    return result.code


if __name__ == "__main__":
    end_with(main)
