"""What a plan needs to know of a model that is cut into stages: names and numbers, no modules."""

from __future__ import annotations

from dataclasses import dataclass

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.partition import imbalance


@dataclass(frozen=True)
class StageCut:
    """A cut into stages; every tuple has one entry a stage."""

    block_names: tuple[tuple[str, ...], ...]
    costs: StageCosts
    """Of each stage on one micro-batch, from fake tensors."""
    balanced: tuple[float, ...]
    """What `partition` balances, in its unit: FLOPs, bytes or seconds."""
    trained_bytes: tuple[int, ...]
    """Bytes of the parameters that an optimizer updates."""
    hidden_bytes: tuple[int, ...]
    """Those of them in `hidden_matrices`, which `optim=muon` treats in its own way."""

    @property
    def blocks_per_stage(self) -> list[int]:
        """How many of the model's blocks each stage has."""
        return [len(names) for names in self.block_names]

    @property
    def imbalance(self) -> float:
        """Largest over mean of the balanced cost; 1 is perfect."""
        return imbalance(self.balanced)
