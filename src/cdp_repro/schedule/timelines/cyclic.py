"""Cyclic data parallelism: micro-batches that start at equal distances (the paper's figure 1)."""

from __future__ import annotations

from cdp_repro.schedule.timelines.timeline import Straight


class Cyclic(Straight):
    """Micro-batch i starts in slot 2c i, with S = cN stages: no two micro-batches use a stage in the same slot.

    It never drains while mini-batches come. S must be a multiple of N. N = S = 3, k = 1, two training steps:

        slot      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        worker 0  F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 1        F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
        worker 2              F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 B1 B0
    """

    name = "cyclic"

    def begin(self, i: int) -> int:
        """Return 2c i: c = S/N."""
        return 2 * (self.sizes.stages // self.sizes.workers) * i

    def check(self, placement: str) -> None:
        """Raise ValueError unless N divides S and, on a pipeline, D, and a training step has N micro-batches or more.

        Take a rank with consecutive stages and no multiple of c inside their range. It computes at most one of them in
        a slot: their forwards are less than 2c slots apart, and a forward of stage j meets a backward of stage j' only
        where j + j' + 1 is a multiple of 2c. So S/D must divide c = S/N.
        """
        stages, workers, ranks = self.sizes.stages, self.sizes.workers, self.sizes.pipeline_ranks
        if stages % workers:
            lower = stages // workers * workers
            choices = " or ".join(f"stages={value}" for value in (lower, lower + workers) if value >= workers)
            raise ValueError(f"stages={stages} is not a multiple of workers={workers}: use {choices}")
        if (chosen := self.sizes.chosen_turns) is not None and chosen < workers:
            raise ValueError(f"micro_batches={chosen} for workers={workers}, which all have one or more: use "
                             f"micro_batches={workers}")  # fmt: skip
        if placement == "pipeline" and ranks % workers:
            raise ValueError(
                f"ranks={ranks} is not a multiple of workers={workers}: on the cyclic timeline a rank would compute "
                f"two of its {stages // ranks} stages in one slot; use ranks={workers}"
            )
