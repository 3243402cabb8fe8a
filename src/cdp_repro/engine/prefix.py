"""The prefix of a slice: what the causal layers of a stage keep of the tokens before it, with its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cdp_repro.models.causal import CausalLayer


@dataclass
class Prefix:
    """The tokens before a slice, as the causal layers of one stage know them; empty for the first slice."""

    tokens: int = 0
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """By name of a layer: its `past`, a leaf of the graph of the slice."""
    after: Prefix | None = None
    """The prefix that includes the slice, once the forward of the slice has run."""
    edges: Mapping[str, GradientEdge] = field(default_factory=dict)
    """By name of a layer: where the gradient of `after.kept` enters the graph of the slice."""

    @contextmanager
    def known_to(self, layers: Mapping[str, CausalLayer]) -> Iterator[None]:
        """Tell the layers of a stage about the prefix, for one forward or backward."""
        for name, layer in layers.items():
            layer.start, layer.keeps, layer.past = self.tokens, True, self.kept.get(name)
        try:
            yield
        finally:
            for layer in layers.values():
                layer.start, layer.keeps, layer.past, layer.present = 0, False, None, None

    def advance(self, layers: Mapping[str, CausalLayer], tokens: int) -> None:
        """Take what the layers keep after a forward on `tokens` tokens."""
        present = {name: layer.present for name, layer in layers.items() if layer.present is not None}
        self.edges = {name: get_gradient_edge(kept) for name, kept in present.items() if kept.requires_grad}
        kept = {name: each.detach().requires_grad_(each.requires_grad) for name, each in present.items()}
        self.after = Prefix(self.tokens + tokens, kept)

    def take_after(self) -> Prefix:
        """Return the prefix of the next slice and let go of it, so that it lives no longer than needed."""
        after, self.after = self.after, None
        assert after is not None, "a forward has run"
        return after

    @property
    def leaves(self) -> list[Tensor]:
        """The kept tensors that take a gradient in the backward of the slice."""
        return [kept for kept in self.kept.values() if kept.requires_grad]

    def take_gradients(self) -> dict[str, Tensor]:
        """Return, after the backward of the slice, the gradients of `kept` by name of the layer, and clear them."""
        found = {name: kept.grad for name, kept in self.kept.items() if kept.grad is not None}
        for kept in self.kept.values():
            kept.grad = None
        return found


def causal_layers(stage: nn.Module) -> dict[str, CausalLayer]:
    """Return the causal layers of a stage by name."""
    return {name: layer for name, layer in stage.named_modules() if isinstance(layer, CausalLayer)}


def check_causal(stages: Iterable[nn.Module], slices: int) -> None:
    """Raise ValueError if sequences are to be cut but no layer of any stage can continue after a slice."""
    if slices > 1 and not any(map(causal_layers, stages)):
        raise ValueError(
            f"slices={slices} cut sequences, whose tokens look back at those before, but none of the layers is a "
            "CausalLayer: derive those that look back from cdp_repro.models.causal.CausalLayer, or use slices=1"
        )
