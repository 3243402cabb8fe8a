"""What the causal layers of a stage keep of the tokens before a slice, with its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cdp_repro.models.causal import CausalLayer


@dataclass
class Prefix:
    """The tokens before a slice, as the causal layers of one stage know them; without any for the first slice."""

    tokens: int = 0
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """By the name of a layer: its `past`, a leaf of the graph of the slice."""
    after: Prefix | None = None
    """The same with the slice, once its forward has run."""
    _edges: Mapping[str, GradientEdge] = field(default_factory=dict)
    """Where the gradient of what `after` has kept enters the graph of the slice."""

    @contextmanager
    def known_to(self, layers: Mapping[str, CausalLayer]) -> Iterator[None]:
        """Tell the layers of a stage, for one forward."""
        for name, layer in layers.items():
            layer.start, layer.keeps, layer.past = self.tokens, True, self.kept.get(name)
        try:
            yield
        finally:
            for layer in layers.values():
                layer.start, layer.keeps, layer.past, layer.present = 0, False, None, None

    def advance(self, layers: Mapping[str, CausalLayer], tokens: int) -> None:
        """Take what the layers keep after a forward on so many tokens."""
        present = {name: layer.present for name, layer in layers.items() if layer.present is not None}
        self._edges = {name: get_gradient_edge(kept) for name, kept in present.items() if kept.requires_grad}
        kept = {name: each.detach().requires_grad_(each.requires_grad) for name, each in present.items()}
        self.after = Prefix(self.tokens + tokens, kept)

    def take_after(self) -> Prefix:
        """Return the prefix of the next slice; what its layers have kept then lives no longer than it is needed."""
        after, self.after = self.after, None
        assert after is not None, "a forward has run"
        return after

    @property
    def leaves(self) -> list[Tensor]:
        """What takes a gradient in the backward of the slice."""
        return [kept for kept in self.kept.values() if kept.requires_grad]

    def edges_of(self, layers: Iterable[str]) -> list[GradientEdge]:
        """Return where the gradients of what these layers have kept after the slice enter its graph."""
        return [self._edges[name] for name in layers]

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of what the layers had kept before the slice, by layer, after its backward."""
        found = {name: kept.grad for name, kept in self.kept.items() if kept.grad is not None}
        for kept in self.kept.values():
            kept.grad = None
        return found


def causal_layers(stage: nn.Module) -> dict[str, CausalLayer]:
    """Return the causal layers of a stage by name."""
    return {name: layer for name, layer in stage.named_modules() if isinstance(layer, CausalLayer)}


def check_causal(stages: Iterable[nn.Module], slices: int) -> None:
    """Raise ValueError if sequences are to be cut, but no layer of any stage can go on where a slice has ended."""
    if slices > 1 and not any(map(causal_layers, stages)):
        raise ValueError(
            f"slices={slices} cut sequences, whose tokens look back at those before, but none of the layers is a "
            "CausalLayer: derive those that look back from cdp_repro.models.causal.CausalLayer, or use slices=1"
        )
