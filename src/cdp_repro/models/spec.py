"""What every builder is given, and the error that every refusal raises."""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(ValueError):
    """A model that cannot be built or cut as asked; the message names a value that works."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes a model is built for, checked."""

    input_shape: tuple[int, int, int]
    """Channels, height and width of one image, in pixels."""
    classes: int
    """Number of logits."""
    hidden: int = 64
    """Width of the hidden layers (mlp only)."""
    depth: int = 6
    """Number of hidden layers (mlp only)."""
    dropout: float = 0.0
    """Probability that dropout zeroes an activation (mlp and timm models)."""

    def __post_init__(self) -> None:
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise ModelError(
                f"input_shape={self.input_shape} is not (channels, height, width), each at least 1, such as (3, 32, 32)"
            )
        for name in ("classes", "hidden", "depth"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} is too small: use at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ModelError(f"dropout={self.dropout} is not a probability below 1: use 0.0 (none) or such as 0.1")
