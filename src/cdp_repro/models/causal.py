"""Causal layers that can read a sequence slice by slice."""

from __future__ import annotations

from torch import Tensor, nn


class CausalLayer(nn.Module):
    """A layer whose output for a token depends on that token, its position and earlier tokens, but not on later ones.

    If sequences are cut along their tokens (`mode=terapipe`), each forward reads one slice. Before it, the engine tells
    the layer about the tokens before the slice; after it, the engine takes what the layer keeps for later slices.
    """

    start: int = 0
    """Number of tokens before the slice; 0 if the sequence is read whole."""
    keeps: bool = False
    """Whether the sequence is cut; a layer that looks back must then set `present`."""
    past: Tensor | None = None
    """What the layer has kept of all tokens before the slice; None if there are none, or nothing was kept."""
    present: Tensor | None = None
    """What the layer keeps of all tokens up to the end of the slice."""
