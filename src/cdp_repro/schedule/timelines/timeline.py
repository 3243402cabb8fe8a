"""The interface of a timeline: the slot in which each micro-batch computes each stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.sizes import Sizes


@dataclass(frozen=True)
class Timeline(ABC):
    """The slots of forwards and backwards; training step t is t periods later than step 0.

    A subclass gives `period`, `forward` and `backward`; `add_timeline` enters it under its name. Replicas compute in
    the same slots, so a timeline ignores them: i counts the turns of a step, its micro-batches without replicas.
    """

    sizes: Sizes
    name: ClassVar[str]
    has_exclusive_stages: ClassVar[bool] = True
    """Whether a stage computes at most one micro-batch in each slot (per replica)."""
    is_simultaneous: ClassVar[bool] = False
    """Whether all workers compute the same stage at once, as collectives need; a pipeline needs another order then."""
    has_own_clocks: ClassVar[bool] = False
    """Whether workers run on clocks of their own, and each micro-batch is an update."""
    splits_backward: ClassVar[bool] = False
    """Whether a backward is two actions: one for the gradient of the stage's input, one for those of its weights."""
    placements: ClassVar[tuple[str, ...] | None] = None
    """The names of the placements that the timeline supports; None for all."""
    layout: ClassVar[str] = "consecutive"
    """How a pipeline spreads the stages over its ranks: `consecutive`, `looped` or `both_ways`."""

    @property
    @abstractmethod
    def period(self) -> int:
        """Slots from the start of one training step to that of the next."""

    @abstractmethod
    def forward(self, i: int, j: int) -> int:
        """Return the slot of the forward of stage j on micro-batch i, counted from the start of its training step."""

    @abstractmethod
    def backward(self, i: int, j: int) -> int:
        """Return the slot of the backward, or of its first part if it has two.

        Gradients are added in the order of the micro-batches: on every stage, what gives those of the weights comes no
        earlier for micro-batch i + 1 than for i.
        """

    def backward_weights(self, i: int, j: int) -> int:
        """Return the slot of the part of the backward that gives the gradients of the weights."""
        return self.backward(i, j)

    @cached_property
    def lanes(self) -> Lanes:
        """The lane of each micro-batch."""
        return Lanes(self.sizes.lanes, each=self.sizes.replicas * self.sizes.slices)

    def check(self, placement: str) -> None:  # noqa: B027 - most timelines have nothing to check
        """Raise ValueError, with values that work, if the timeline cannot have these sizes on this placement."""


class Straight(Timeline):
    """A micro-batch runs its stages forward and then backward, without a pause: its first slot gives all others.

    Each forward and backward takes d slots, 1 on most timelines. A subclass gives `begin`, also `lanes` if d is not 1,
    and `period` if the next step does not begin as one more micro-batch would.
    """

    @abstractmethod
    def begin(self, i: int) -> int:
        """Return the slot in which micro-batch i begins, counted from the start of its training step."""

    @property
    def period(self) -> int:
        """The slot in which one more micro-batch would begin."""
        return self.begin(self.sizes.turns)

    def forward(self, i: int, j: int) -> int:
        """Return begin + d j, the first of the slots that the forward takes."""
        return self.begin(i) + self.lanes.duration(i) * j

    def backward(self, i: int, j: int) -> int:
        """Return begin + d (2S-j) - 1, the last of the slots that the backward takes."""
        return self.begin(i) + self.lanes.duration(i) * (2 * self.sizes.stages - j) - 1
