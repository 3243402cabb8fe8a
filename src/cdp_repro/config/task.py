"""What differs between images and text: what a sample is, and which number judges a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """What the samples of a data set are, and which number of the summary decides which run is better."""

    sample: str
    """The word for a sample, in the singular."""
    unit: str
    """What throughput counts, in the plural: `throughput/<unit>_per_second`."""
    metric: str
    """Key, in the summary, of the number that decides."""
    name: str
    """The name of this number, for people."""
    metric_unit: str
    difference_unit: str
    """Unit of a difference of two such numbers."""
    is_text: bool = False
    more_is_better: bool = True
    digits: int = 2
    """Digits of the number that are shown after the decimal point."""

    @property
    def label(self) -> str:
        """The name of the number with its unit: `test top-1 [%]`."""
        return f"{self.name} [{self.metric_unit}]"

    def units(self, input_shape: tuple[int, ...]) -> int:
        """Return how many units a sample of this shape has: its tokens, or one image."""
        return input_shape[0] if self.is_text else 1

    def shape_text(self, input_shape: tuple[int, ...]) -> str:
        """Return samples of this shape in words: `images 3x32x32`, `sequences of 128 tokens`."""
        sizes = "x".join(map(str, input_shape))
        return f"{self.sample}s of {sizes} {self.unit}" if self.is_text else f"{self.sample}s {sizes}"

    def score_text(self, summary: Mapping[str, Any]) -> str:
        """Return the number that decides, with its unit."""
        return f"{summary[self.metric]:.{self.digits}f} {self.metric_unit}"


IMAGES = Task("image", "images", "eval/top1_percent", "test top-1", "%", "points")
TEXT = Task(
    "sequence", "tokens", "eval/nats_per_token", "validation loss", "nats a token", "nats",
    is_text=True, more_is_better=False, digits=4,
)  # fmt: skip


FIXED_SHAPES: Mapping[str, Mapping[str, int]] = {
    "digits": {"channels": 1, "image_size": 8},
    "cifar10": {"channels": 3, "image_size": 32},
    "imagenet": {"channels": 3},
    "synthetic": {"channels": 3},
}
"""By data set: the settings of its images that cannot be chosen, with their only value."""


def task_of(dataset: str) -> Task:
    """Return the task of a data set."""
    return TEXT if dataset == "text" else IMAGES
