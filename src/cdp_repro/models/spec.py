"""The argument of every builder, and the error of every refusal."""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(ValueError):
    """A model that cannot be built or cut as asked; the message names a value that works."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes that a model is built for.

    Raises:
        ModelError: sizes that no model can have.
    """

    input_shape: tuple[int, ...]
    """Channels, height and width of one image, in pixels; for text, the number of tokens of a sequence."""
    classes: int
    """Number of logits; for text, of each token."""
    hidden: int = 64
    """Width of the hidden layers (mlp only)."""
    depth: int = 6
    """Number of hidden layers (mlp), or blocks (gpt; two_towers: of each of its three parts)."""
    dropout: float = 0.0
    """Probability that dropout zeroes an activation, in [0, 1) (mlp, gpt, two_towers; timm models: drop_rate, and
    proj_drop_rate where the model has it)."""
    width: int = 96
    """Values for each token between blocks (gpt), or channels of a tower (two_towers)."""
    heads: int = 4
    """Attention heads of a block (gpt only); a divisor of `width`."""

    def __post_init__(self) -> None:
        if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
            raise ModelError(
                f"input_shape={self.input_shape} is neither (channels, height, width) nor (tokens,), each at least 1, "
                "such as (3, 32, 32) or (128,)"
            )
        for name in ("classes", "hidden", "depth", "width", "heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} is too small: use at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ModelError(f"dropout={self.dropout} is not a probability below 1: use 0.0 (none) or such as 0.1")
