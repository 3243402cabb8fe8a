"""What a plan needs to know about a model cut into stages: names and numbers, no modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.partition import imbalance
from cdp_repro.schedule.by_name import is_entered


def follows_from_shapes(partition: str, model: str) -> bool:
    """Whether a cut of a model by `partition` follows from this package's code and the shapes of the model's tensors.

    A cut by measured time does not, nor one of an installed package's model, whose code can do anything.
    """
    return partition != "time" and not is_entered("models", model)


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

    def to_dict(self) -> dict[str, Any]:
        """Return the names and numbers as plain data, for a file or for other ranks."""
        return {field.name: getattr(self, field.name) for field in fields(StageCut)} | {"costs": asdict(self.costs)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageCut:
        """Return the cut of which `to_dict` has made `data`."""
        costs = StageCosts(**{name: tuple(values) for name, values in data["costs"].items()})
        names = tuple(map(tuple, data["block_names"]))
        others = {name: tuple(data[name]) for name in ("balanced", "trained_bytes", "hidden_bytes")}
        return StageCut(names, costs, **others)

    @property
    def blocks_per_stage(self) -> list[int]:
        """Number of the model's blocks in each stage."""
        return [len(names) for names in self.block_names]

    @property
    def imbalance(self) -> float:
        """Largest over mean of the balanced cost; 1 is perfect."""
        return imbalance(self.balanced)
