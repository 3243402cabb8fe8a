"""Data parallelism on a pipeline, with a flush at the end of each training step: GPipe, 1F1B and TeraPipe.

D ranks have S/D consecutive stages each, which a micro-batch runs one after the other: what the literature draws for
one stage a rank holds for these chunks, and a chunk takes S/D slots. So no rank computes two things in a slot, whatever
M and D are: M = kNL micro-batches, all of which may be under way at once. The idle share is (D-1)/(M+D-1).

Branches that join run side by side: a micro-batch passes E < D ranks one after the other, and E takes the place of D,
in the slots and in the idle share. Forwards of a shorter branch wait until what joins it is about to need them.
"""

from __future__ import annotations

from abc import abstractmethod

from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.timelines.timeline import Timeline


class Flushing(Timeline):
    """What they have in common: chunks in units of S/D slots, and the flush."""

    placements = ("single_device", "pipeline")

    @property
    def period(self) -> int:
        """2 (M + E - 1) S/D."""
        return 2 * (self.sizes.turns + self.sizes.depth - 1) * self.chunk

    @property
    def chunk(self) -> int:
        """S/D: stages of a rank."""
        return self.sizes.stages // self.sizes.pipeline_ranks

    def forward(self, i: int, j: int) -> int:
        """Return the slot within the forward of the chunk."""
        rank, place = divmod(j, self.chunk)
        return self.chunk * self.forward_unit(i, self._level(rank)) + place

    def backward(self, i: int, j: int) -> int:
        """Return the slot within the backward of the chunk, last stage first."""
        rank, place = divmod(j, self.chunk)
        return self.chunk * self.backward_unit(i, self._level(rank)) + self.chunk - 1 - place

    def _level(self, rank: int) -> int:
        """Return the place of a rank among the E that a micro-batch passes: of a chain the rank itself."""
        return self.sizes.depth - 1 - self.sizes.behind[rank]

    def check(self, placement: str) -> None:
        """Raise ValueError if a rank of a pipeline would have stages of two branches."""
        if placement == "pipeline":
            check_chunks(self.sizes)

    @abstractmethod
    def forward_unit(self, i: int, level: int) -> int:
        """Return when the ranks of a level run the forward of their chunks on micro-batch i, in units of S/D slots."""

    @abstractmethod
    def backward_unit(self, i: int, level: int) -> int:
        """Return when they run the backward."""


def check_chunks(sizes: Sizes) -> None:
    """Raise ValueError if the stages of a pipeline's rank are not one behind the other."""

    def fits(ranks: int) -> bool:
        chunk = sizes.stages // ranks
        return all(stage % chunk == 0 or sizes.sources[stage] == (stage - 1,) for stage in range(sizes.stages))

    if not fits(sizes.pipeline_ranks):
        works = [ranks for ranks in range(2, sizes.stages + 1) if sizes.stages % ranks == 0 and fits(ranks)]
        raise ValueError(
            f"ranks={sizes.pipeline_ranks} puts stages on one rank that are not one behind the other, as "
            f"branches join: use {' or '.join(f'ranks={ranks}' for ranks in works)}"
        )


class GPipe(Flushing):
    """All forwards, then all backwards (Huang et al. 2019). M = D = 3:

    unit    0  1  2  3  4  5  6  7  8  9
    rank 0  F  F  F              B  B  B
    rank 1     F  F  F        B  B  B
    rank 2        F  F  F  B  B  B
    """

    name = "gpipe"

    def forward_unit(self, i: int, level: int) -> int:
        """Return i + l."""
        return i + level

    def backward_unit(self, i: int, level: int) -> int:
        """Return M + E-1 + i + E-1-l."""
        return self.sizes.turns + 2 * (self.sizes.depth - 1) + i - level


class TeraPipe(GPipe):
    """GPipe with micro-batches cut along the tokens, too (Li et al. 2021): forwards from the first tokens of a sequence
    to the last, backwards the other way. Micro-batches have the numbers of their backwards (`Sizes.place`). L = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F2 F1 F0             B0 B1 B2
        rank 1     F2 F1 F0       B0 B1 B2
        rank 2        F2 F1 F0 B0 B1 B2
    """

    name = "terapipe"

    def forward_unit(self, i: int, level: int) -> int:
        """Return the same as GPipe for the micro-batch that has the place of i from the other end of its sequence."""
        first = i // self.sizes.slices * self.sizes.slices
        return super().forward_unit(2 * first + self.sizes.slices - 1 - i, level)


class OneForwardOneBackward(Flushing):
    """A backward as soon as one is due, one forward after each (Narayanan et al. 2019). M = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F  F  F        B     B     B
        rank 1     F  F     B  F  B     B
        rank 2        F  B  F  B  F  B

    Rank r runs its first D-r forwards at once, then one forward after each backward: no rank holds more than D-r
    micro-batches. Forwards after these are in units of the parity of r, backwards in the others, so they never meet.
    """

    name = "one_f_one_b"

    def forward_unit(self, i: int, level: int) -> int:
        """Return i + l for the first E-l micro-batches, 2i + l for others."""
        return (i if i < self.sizes.depth - level else 2 * i) + level

    def backward_unit(self, i: int, level: int) -> int:
        """Return 2i + 2E-1-l."""
        return 2 * (i + self.sizes.depth) - 1 - level
