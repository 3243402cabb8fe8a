"""What a plan needs to know about a model cut into stages: names and numbers, no modules."""

from __future__ import annotations

from dataclasses import dataclass

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.partition import imbalance


@dataclass(frozen=True)
class StageCut:
    """A cut into stages; every tuple has one entry a stage."""

    block_names: tuple[tuple[str, ...], ...]
    costs: StageCosts
    """Costs of each stage on one micro-batch, from fake tensors."""
    balanced: tuple[float, ...]
    """The cost that `partition` balances, in its unit: FLOPs, bytes or seconds."""
    trained_bytes: tuple[int, ...]
    """Bytes of the parameters that an optimizer updates."""
    hidden_bytes: tuple[int, ...]
    """The part of `trained_bytes` in `hidden_matrices`, which `optim=muon` treats in its own way."""

    @property
    def blocks_per_stage(self) -> list[int]:
        """Number of the model's blocks in each stage."""
        return [len(names) for names in self.block_names]

    @property
    def imbalance(self) -> float:
        """Largest over mean of the balanced cost; 1 is perfect."""
        return imbalance(self.balanced)
