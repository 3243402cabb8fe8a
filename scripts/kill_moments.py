"""`cdp-train` that leaves a file when it comes to a moment, and is slow from there on, so that kill.py ends it there.

KILL_MOMENT is "training", "checkpoint", "evaluation" or "start-up", KILL_STEP a training step, KILL_FILE the file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from cdp_repro.cli import train as command

LONG_SECONDS = 30.0

_train_rank = command._train_rank


def slow_rank(*arguments: Any) -> dict[str, Any]:
    """Train in one rank, slow from the moment on."""
    from cdp_repro.training import checkpoint, trainer  # here: a launching process needs none of it

    moment, step, told = os.environ["KILL_MOMENT"], int(os.environ["KILL_STEP"]), Path(os.environ["KILL_FILE"])
    if moment == "checkpoint":
        _slow_saving(checkpoint.CheckpointStore, step, told)
    elif moment == "evaluation":
        _slow_evaluation(trainer, told)
    else:
        _slow_training(trainer.Trainer, step, told)
    return _train_rank(*arguments)


def _tell(told: Path, seconds: float) -> None:
    told.touch()
    time.sleep(seconds)


def _slow_training(trainer: Any, step: int, told: Path) -> None:
    """Wait before each training step from `step` on."""
    honest = trainer._batches

    def batches(self: Any, first: int, end: int, stop: Any) -> Any:
        for number, batch in enumerate(honest(self, first, end, stop), start=first):
            if number >= step:
                _tell(told, 0.1)
            yield batch

    trainer._batches = batches


def _slow_saving(store: Any, step: int, told: Path) -> None:
    """Wait at one of the file operations of the first checkpoint from `step` on; which one, the process id says."""
    save, sync = store.save, os.fsync
    operations: list[int] = []

    def slow_sync(file: int) -> None:
        if operations and operations.pop() == os.getpid() % 4:
            _tell(told, LONG_SECONDS)
        sync(file)

    def slow_save(self: Any, number: int, *content: Any) -> Any:
        operations[:] = range(4) if number >= step else ()
        return save(self, number, *content)

    store.save, os.fsync = slow_save, slow_sync


def _slow_evaluation(trainer: Any, told: Path) -> None:
    """Wait before the first evaluation."""
    honest = trainer.score_of

    def score_of(outputs: Any) -> Any:
        _tell(told, LONG_SECONDS)
        return honest(outputs)

    trainer.score_of = score_of


if __name__ == "__main__":
    command._train_rank = slow_rank
    sys.exit(command.main())
