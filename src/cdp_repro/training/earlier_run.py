"""What a run goes on from: the checkpoint of its earlier part, and what that part was trained by."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdp_repro.launch.team import Team
from cdp_repro.observe.run_directory import RunDirectory
from cdp_repro.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore


@dataclass(frozen=True)
class EarlierRun:
    """The earlier part of a run; empty for a run that begins.

    Attributes:
        checkpoint: The state from which the run goes on; None at its start.
        summary: What summary.json holds of a run that is finished already, else None.
    """

    checkpoint: Checkpoint | None = None
    summary: dict[str, Any] | None = None

    def shared(self, team: Team) -> EarlierRun:
        """Return, on every rank, what rank 0 has found."""
        found = self.checkpoint
        own = None if found is None else (found.step, found.tensors, found.meta)
        parts, summary = team.share((own, self.summary))
        return EarlierRun(None if parts is None else Checkpoint(*parts), summary)

    @property
    def versions(self) -> dict[str, str]:
        """The versions by which the run was trained up to the checkpoint; none if it does not say."""
        found = self.checkpoint.meta.get("versions") if self.checkpoint else None
        return found if isinstance(found, dict) else {}

    @property
    def blocks_per_stage(self) -> list[int] | None:
        """The number of blocks of each stage in the checkpoint; None if it has none.

        Raises:
            CheckpointError: What it has are no numbers of blocks.
        """
        blocks = self.checkpoint.meta.get("blocks_per_stage") if self.checkpoint else None
        if blocks is None:
            return None
        if not isinstance(blocks, list) or not all(isinstance(number, int) and number > 0 for number in blocks):
            raise CheckpointError(
                "the checkpoint does not fit this run: expected numbers of blocks in blocks_per_stage, "
                f"found {blocks!r}"
            )
        return blocks


def open_earlier(run_dir: Path, restart: bool, stack: ExitStack) -> tuple[RunDirectory, EarlierRun]:
    """Open the directory of an earlier run; unless that is finished, lock it until `stack` ends, and read its state.

    Nothing is written for a run that is finished: its directory may be read-only.

    Raises:
        RunDirectoryError: There is no run, or another process writes there.
        CheckpointError: It has no whole checkpoint, and `restart` is False; or it has one, and `restart` is True.
    """
    directory = RunDirectory.open(run_dir)
    summary = directory.summary()
    if summary.get("status") == "finished":
        return directory, EarlierRun(summary=summary)
    stack.enter_context(directory.locked())
    return directory, EarlierRun(_newest_checkpoint(directory, restart))


def _newest_checkpoint(directory: RunDirectory, restart: bool) -> Checkpoint | None:
    """Return the checkpoint to go on from; None if the run begins anew."""
    store = CheckpointStore(directory.checkpoints_path)
    newest = store.latest()
    if newest is None and not restart:
        raise CheckpointError(
            f"{directory.path} has no checkpoint to go on from. Add restart=true to train it from step 0, which "
            "empties its metrics.jsonl"
        )
    if newest is not None and restart:
        raise CheckpointError(
            f"restart=true is for a run without a checkpoint, and {newest} is one: drop restart=true to go on from it, "
            "or start another run with run_dir="
        )
    return None if newest is None else store.load()
