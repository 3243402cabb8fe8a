"""Data parallelism on a pipeline, with a flush at the end of each training step: GPipe, 1F1B and TeraPipe.

D ranks have S/D consecutive stages each, which a micro-batch runs one after the other: what the literature draws for
one stage a rank holds for these chunks, and a chunk takes S/D slots. So no rank computes two things in a slot, whatever
M and D are: M = kNL micro-batches, all of which may be under way at once. The idle share is (D-1)/(M+D-1).
"""

from __future__ import annotations

from abc import abstractmethod

from cdp_repro.schedule.timelines.timeline import Timeline


class Flushing(Timeline):
    """What they have in common: chunks in units of S/D slots, and the flush."""

    placements = ("single_device", "pipeline")

    @property
    def period(self) -> int:
        """2 (M + D - 1) S/D."""
        return 2 * (self.sizes.turns + self.sizes.pipeline_ranks - 1) * self.chunk

    @property
    def chunk(self) -> int:
        """S/D: stages of a rank."""
        return self.sizes.stages // self.sizes.pipeline_ranks

    def forward(self, i: int, j: int) -> int:
        """Return the slot within the forward of the chunk."""
        rank, place = divmod(j, self.chunk)
        return self.chunk * self.forward_unit(i, rank) + place

    def backward(self, i: int, j: int) -> int:
        """Return the slot within the backward of the chunk, last stage first."""
        rank, place = divmod(j, self.chunk)
        return self.chunk * self.backward_unit(i, rank) + self.chunk - 1 - place

    @abstractmethod
    def forward_unit(self, i: int, rank: int) -> int:
        """Return when a rank runs the forward of its chunk on micro-batch i, in units of S/D slots."""

    @abstractmethod
    def backward_unit(self, i: int, rank: int) -> int:
        """Return when it runs the backward."""


class GPipe(Flushing):
    """All forwards, then all backwards (Huang et al. 2019). M = D = 3:

    unit    0  1  2  3  4  5  6  7  8  9
    rank 0  F  F  F              B  B  B
    rank 1     F  F  F        B  B  B
    rank 2        F  F  F  B  B  B
    """

    name = "gpipe"

    def forward_unit(self, i: int, rank: int) -> int:
        """Return i + r."""
        return i + rank

    def backward_unit(self, i: int, rank: int) -> int:
        """Return M + D-1 + i + D-1-r."""
        return self.sizes.turns + 2 * (self.sizes.pipeline_ranks - 1) + i - rank


class TeraPipe(GPipe):
    """GPipe with micro-batches cut along the tokens, too (Li et al. 2021): forwards from the first tokens of a sequence
    to the last, backwards the other way. Micro-batches have the numbers of their backwards (`Sizes.place`). L = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F2 F1 F0             B0 B1 B2
        rank 1     F2 F1 F0       B0 B1 B2
        rank 2        F2 F1 F0 B0 B1 B2
    """

    name = "terapipe"

    def forward_unit(self, i: int, rank: int) -> int:
        """Return the same as GPipe for the micro-batch that has the place of i from the other end of its sequence."""
        first = i // self.sizes.slices * self.sizes.slices
        return super().forward_unit(2 * first + self.sizes.slices - 1 - i, rank)


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

    def forward_unit(self, i: int, rank: int) -> int:
        """Return i + r for the first D-r micro-batches, 2i + r for others."""
        return (i if i < self.sizes.pipeline_ranks - rank else 2 * i) + rank

    def backward_unit(self, i: int, rank: int) -> int:
        """Return 2i + 2D-1-r."""
        return 2 * (i + self.sizes.pipeline_ranks) - 1 - rank
