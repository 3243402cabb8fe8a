"""What differs between images and text, in one place: what a sample is, and how a model is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Task:
    """What the samples of a data set are, and the number of the summary that decides which run is better."""

    sample: str
    """One of what a mini-batch is counted in."""
    unit: str
    """What throughput is counted in: `throughput/<unit>_per_second`."""
    metric: str
    """Key of the number that decides."""
    name: str
    """The number in words."""
    metric_unit: str
    difference_unit: str
    """Unit of a difference of two such numbers."""
    is_text: bool = False
    more_is_better: bool = True
    digits: int = 2
    """Digits of the number behind the point that are shown."""

    @property
    def label(self) -> str:
        """The number in words, with its unit."""
        return f"{self.name} [{self.metric_unit}]"

    def input_dtype(self, parameters: torch.dtype) -> torch.dtype:
        """Return the type of what the model is given: that of its parameters, or token numbers."""
        import torch  # here: it takes seconds, and most of what reads a configuration needs none of it

        return torch.int64 if self.is_text else parameters

    def units(self, input_shape: tuple[int, ...]) -> int:
        """Return how many units a sample has."""
        return input_shape[0] if self.is_text else 1

    def shape_text(self, input_shape: tuple[int, ...]) -> str:
        """Return samples of a shape in words."""
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
"""What cannot be chosen of the images of a data set, by the names of its settings."""


def task_of(dataset: str) -> Task:
    """Return the task of a data set."""
    return TEXT if dataset == "text" else IMAGES
