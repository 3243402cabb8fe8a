"""Causal layers that can read a sequence slice after slice."""

from __future__ import annotations

from torch import Tensor, nn


class CausalLayer(nn.Module):
    """A layer whose output for a token depends on this token's place and on tokens before it, but on none after.

    Where sequences are cut along their tokens (`mode=terapipe`), each forward reads a slice of them. Around it the
    engine says what came before, and takes what the layer keeps for the slices after.
    """

    start: int = 0
    """Tokens before the slice; 0 where a sequence is read whole."""
    keeps: bool = False
    """Whether the sequence is cut, so that a layer that looks back has to leave something in `present`."""
    past: Tensor | None = None
    """What the layer has kept of all tokens before the slice; None if there are none, or nothing was kept."""
    present: Tensor | None = None
    """What it keeps of all tokens up to the end of the slice."""
