"""Pipelines: each rank has an order of its own, and each training step ends with a flush.

A rank begins the next task of its order as soon as it can, so the slots follow from the orders alone. D ranks have S/D
stages each. A micro-batch runs consecutive stages of a rank one after the other, as a chunk of S/D slots. So the
pictures of the literature, which have one stage per rank, hold for chunks, too. No rank computes two things in a slot,
whatever M and D are, and all M micro-batches may be under way at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest

from cdp_repro.schedule.actions import Op
from cdp_repro.schedule.timelines.timeline import Timeline

Task = tuple[Op, int, int]
"""A forward, a backward or a part of one: its kind, the micro-batch i of the training step, and the stage j."""

_Passes = Sequence[Sequence[Task]]
"""For each forward, or backward, of a micro-batch through a rank, its tasks in order."""


class Ordered(Timeline):
    """A timeline that follows from the order of each rank, with a flush. A subclass gives `order`."""

    placements = ("single_device", "pipeline")

    @abstractmethod
    def order(self, rank: int) -> Iterable[Task]:
        """Return what a rank computes in a training step, in order."""

    @property
    def ranks(self) -> int:
        """Number of ranks that have an order."""
        return self.sizes.pipeline_ranks

    @cached_property
    def period(self) -> int:
        """The slots from the first forward to the last backward."""
        return 1 + max(self._slots.values())

    def forward(self, i: int, j: int) -> int:
        """Return the slot that follows from the orders."""
        return self._slots[Op.FORWARD, i, j]

    def backward(self, i: int, j: int) -> int:
        """Return the slot that follows from the orders."""
        return self._slots[Op.BACKWARD_INPUT if self.splits_backward else Op.BACKWARD, i, j]

    def backward_weights(self, i: int, j: int) -> int:
        """Return the slot that follows from the orders."""
        return self._slots[Op.BACKWARD_WEIGHTS if self.splits_backward else Op.BACKWARD, i, j]

    @cached_property
    def _slots(self) -> dict[Task, int]:
        """The slot of each task: after the task before it on its rank, and after the tasks that it needs."""
        orders: list[list[Task]] = [list(self.order(rank))[::-1] for rank in range(self.ranks)]
        free = [0] * self.ranks
        found: dict[Task, int] = {}
        while any(orders):
            before = len(found)
            for rank, left in enumerate(orders):
                while left and (needed := set(self._needed(left[-1]))) <= found.keys():
                    slot = max([free[rank], *(found[task] + 1 for task in needed)])
                    found[left.pop()], free[rank] = slot, slot + 1
            if len(found) == before:
                raise ValueError(f"the orders of {self.name} wait for each other: {[o[-1] for o in orders if o]}")
        return found

    def _needed(self, task: Task) -> list[Task]:
        """Return the tasks whose results `task` reads; none if it reads the data."""
        op, i, j = task
        if op is Op.FORWARD:
            return [(op, i, source) for source in self.sizes.sources[j]]
        if op is Op.BACKWARD_WEIGHTS:
            return [(Op.BACKWARD_INPUT, i, j)]
        reader = self.sizes.readers[j]
        return [(Op.FORWARD, i, j) if reader < 0 else (op, i, reader)]

    def _of_rank(self, op: Op, rank: int) -> list[list[Task]]:
        """Return each micro-batch's tasks on a rank with consecutive stages; backwards begin with the last stage."""
        chunk = self.sizes.stages // self.ranks
        stages = range(rank * chunk, (rank + 1) * chunk)[:: 1 if op is Op.FORWARD else -1]
        return [[(op, i, j) for j in stages] for i in range(self.sizes.turns)]

    def check(self, placement: str) -> None:
        """Raise ValueError if the stages on a rank of a pipeline are not a chain."""
        sizes = self.sizes

        def fits(ranks: int) -> bool:
            chunk = sizes.stages // ranks
            return all(stage % chunk == 0 or sizes.sources[stage] == (stage - 1,) for stage in range(sizes.stages))

        if placement == "pipeline" and not fits(sizes.pipeline_ranks):
            works = [ranks for ranks in range(2, sizes.stages + 1) if sizes.stages % ranks == 0 and fits(ranks)]
            raise ValueError(
                f"ranks={sizes.pipeline_ranks} puts stages on one rank that are not one behind the other, as "
                f"branches join: use {' or '.join(f'ranks={ranks}' for ranks in works)}"
            )

    def _refuse_branches(self) -> None:
        """Raise ValueError, with modes that work, if the stages are not a chain."""
        if self.sizes.chosen_sources:
            raise ValueError(
                f"mode={self.name} passes a chain of stages to and fro, not branches that join: use "
                "mode=gpipe, one_f_one_b or zero_bubble"
            )


class GPipe(Ordered):
    """All forwards, then all backwards (Huang et al. 2019). The idle share is (D-1)/(M + D-1). M = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F  F  F              B  B  B
        rank 1     F  F  F        B  B  B
        rank 2        F  F  F  B  B  B

    A unit is S/D slots. Branches that join run side by side: a micro-batch passes only E < D ranks one after the other,
    and E replaces D, here and in 1F1B.

    Sequences may be cut into L slices along their tokens, too (`terapipe`, Li et al. 2021). Forwards go from the first
    tokens of a sequence to the last, backwards the other way. Micro-batches are numbered by their backwards
    (`Sizes.place`). L = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F2 F1 F0             B0 B1 B2
        rank 1     F2 F1 F0       B0 B1 B2
        rank 2        F2 F1 F0 B0 B1 B2
    """

    name = "gpipe"

    def order(self, rank: int) -> Iterable[Task]:
        """Return the forwards, each sequence's slices from the first tokens to the last, then the backwards."""
        forwards, slices = self._of_rank(Op.FORWARD, rank), self.sizes.slices
        sequences = [forwards[first : first + slices][::-1] for first in range(0, len(forwards), slices)]
        return chain(*chain(*sequences), *self._of_rank(Op.BACKWARD, rank))


class OneForwardOneBackward(Ordered):
    """Each backward as soon as it is due, with one forward after it (Narayanan et al. 2019). M = D = 3:

        unit    0  1  2  3  4  5  6  7  8  9
        rank 0  F  F  F        B     B     B
        rank 1     F  F     B  F  B     B
        rank 2        F  B  F  B  F  B

    Rank r runs its first D-r forwards at once, then one forward after each backward. So rank r holds at most D-r
    micro-batches. The idle share is that of GPipe.
    """

    name = "one_f_one_b"

    def order(self, rank: int) -> Iterable[Task]:
        """Return a forward for each rank that follows, then one forward and one backward in turn."""
        forwards, backwards = self._of_rank(Op.FORWARD, rank), self._of_rank(Op.BACKWARD, rank)
        return _one_of_each(forwards, backwards, self.sizes.behind[rank])


class Interleaved(Ordered):
    """Stage j on rank j mod D: a micro-batch passes each rank v = S/D times (Narayanan et al. 2021).

    D micro-batches at a time go through a rank's first stage, then through its second, and so on. Rank r runs
    2(D-1-r) + (v-1)D forwards, then one forward and one backward in turn. A chunk is 1/v of one without interleaving,
    and so is the bubble: the idle share is (D-1)/(vM + D-1). D = v = M = 2 (stage.micro-batch):

        slot    0    1    2    3    4    5    6    7    8    9
        rank 0  F0.0 F0.1 F2.0 F2.1      B2.0      B2.1 B0.0 B0.1
        rank 1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """

    name = "interleaved"
    layout = "looped"

    def check(self, placement: str) -> None:  # noqa: ARG002 - the same for all
        """Raise ValueError unless D divides M / R and the stages are a chain."""
        self._refuse_branches()
        ranks, turns = self.ranks, self.sizes.turns
        if turns % ranks:
            lower = turns // ranks * ranks
            name = self.sizes.turns_are_set_by
            works = " or ".join(f"{name}={value}" for value in (lower, lower + ranks) if value)
            raise ValueError(
                f"mode=interleaved runs micro-batches in groups of one a rank: {turns} of them are not a multiple of "
                f"ranks={ranks}: use {works}" + (f" with ranks={ranks} and accumulate=1" if name == "workers" else "")
            )

    def order(self, rank: int) -> Iterable[Task]:
        """Return the forwards that fill the pipeline, then one forward and one backward in turn."""
        ahead = 2 * (self.ranks - 1 - rank) + self.sizes.stages - self.ranks
        return _one_of_each(self._of_rank(Op.FORWARD, rank), self._of_rank(Op.BACKWARD, rank), ahead)

    def _of_rank(self, op: Op, rank: int) -> list[list[Task]]:
        """Return each pass through a rank: D micro-batches through one of its stages, then through the next."""
        stages = range(rank, self.sizes.stages, self.ranks)[:: 1 if op is Op.FORWARD else -1]
        groups = range(0, self.sizes.turns, self.ranks)
        return [[(op, i, j)] for first in groups for j in stages for i in range(first, first + self.ranks)]


class ZeroBubble(Ordered):
    """1F1B with each backward split: first the gradient of the input, which others wait for, then those of the weights.

    Rank r puts the latter off by r micro-batches, to fill the idle slots at the end (ZB-H1 of Qi et al. 2023). No rank
    keeps more than D micro-batches. If F, I and W take the same time, the idle share is (D-1)/(3M + D-1) for M >= D.
    D = M = 3 (I: gradient of the input, W: of the weights):

        slot    0  1  2  3  4  5  6  7  8  9  10
        rank 0  F  F  F        I  W  I  W  I  W
        rank 1     F  F     I  F  I  W  I  W  W
        rank 2        F  I  F  I  F  I  W  W  W
    """

    name = "zero_bubble"
    splits_backward = True

    def order(self, rank: int) -> Iterable[Task]:
        """Return the order of 1F1B with the gradients of weights put off; a rank's stages run as one."""
        behind = self.sizes.behind[rank]
        level = max(self.sizes.behind) - behind  # for a chain, the rank itself
        forwards, inputs, weights = (
            self._of_rank(op, rank) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHTS)
        )
        backwards = [tasks + later for tasks, later in zip(inputs, [[]] * level + weights, strict=False)]
        return chain(_one_of_each(forwards, backwards, behind), *weights[max(0, self.sizes.turns - level) :])


class Chimera(Ordered):
    """Two pipelines over the same ranks: even micro-batches go from rank 0 to D-1, odd ones back (Li and Hoefler 2021).

    A rank orders its tasks by the slots they would have if each direction ran alone on the cyclic timeline; it does not
    wait for these slots. One direction computes where the other would idle: the idle share is (D-2)/(2M + D-2) for
    M >= D. Each rank holds two stages. D = M = 4, micro-batches 0 to 3:

        slot    0  1  2  3  4  5  6  7  8  9
        rank 0  F0 F2    F1 B1 F3 B3 B0    B2
        rank 1     F0 F1 F2 F3 B1 B0 B3 B2
        rank 2     F1 F0 F3 F2 B0 B1 B2 B3
        rank 3  F1 F3    F0 B0 F2 B2 B1    B3
    """

    name = "chimera"
    layout = "both_ways"
    has_exclusive_stages = False

    @property
    def ranks(self) -> int:
        """One rank per stage, on a single device, too."""
        return self.sizes.stages

    def check(self, placement: str) -> None:
        """Raise ValueError unless D = S and M are even, R is 1 and the stages are a chain.

        On a pipeline M must also have a factor in common with N.
        """
        self._refuse_branches()
        stages, ranks, turns = self.sizes.stages, self.sizes.pipeline_ranks, self.sizes.turns
        if stages % 2:
            raise ValueError(f"mode=chimera pairs its ranks, not stages={stages}: use stages={stages + 1}")
        if placement == "pipeline" and ranks != stages:
            raise ValueError(f"mode=chimera has a stage a rank in each direction: use ranks={stages}, not {ranks}")
        if turns % 2:
            raise ValueError(
                f"mode=chimera sends one half of the micro-batches each way, not {turns}: use "
                f"{self.sizes.turns_are_set_by}={turns + 1}"
            )
        if placement == "pipeline" and self.sizes.statistics == 1:
            raise ValueError(
                "mode=chimera runs a stage on two ranks at once, which cannot both have the only set of running "
                f"statistics, as workers={self.sizes.workers} and {turns} micro-batches share one: use "
                f"workers={self.sizes.workers + 1}"
            )
        if self.sizes.replicas > 1:
            raise ValueError(f"mode=chimera has two copies of each stage, not replicas={self.sizes.replicas} of two: "
                             "use replicas=1")  # fmt: skip

    def order(self, rank: int) -> Iterable[Task]:
        """Return tasks as they are due: stage p of a direction's q-th micro-batch in slots 2q + p and 2q + 2D-1-p."""
        last = self.sizes.stages - 1
        tasks = []
        for i in range(self.sizes.turns):
            j = last - rank if i % 2 else rank
            begin = 2 * (i // 2)
            tasks += [(begin + j, (Op.FORWARD, i, j)), (begin + 2 * last + 1 - j, (Op.BACKWARD, i, j))]
        return [task for _, task in sorted(tasks, key=lambda timed: (timed[0], timed[1][0] is Op.FORWARD, timed[1][1]))]


def _one_of_each(forwards: _Passes, backwards: _Passes, ahead: int) -> Iterable[Task]:
    """Return the tasks of `ahead` forwards, then those of one forward and one backward in turn."""
    return chain(*forwards[:ahead], *chain(*zip_longest(forwards[ahead:], backwards, fillvalue=())))
