"""What one action costs: the numbers that `simulate` needs, measured or assumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage on one micro-batch; every tuple has one entry a stage."""

    forward_bytes: tuple[int, ...]
    """Activation bytes that the forward of the stage leaves alive."""
    backward_bytes: tuple[int, ...]
    """Activation bytes that the backward of the stage releases. The two differ where a stage's input, made by the
    stage before, is kept only by the stage that reads it; their sums over all stages are equal."""
    parameter_bytes: tuple[int, ...]
    """Bytes of one version of the stage's parameters."""
    forward_flops: tuple[int, ...]
    """Floating-point operations (2 x multiply-adds) of the forward."""
    backward_flops: tuple[int, ...]
    """Floating-point operations (2 x multiply-adds) of the backward."""

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in vars(self).items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"every cost needs one entry a stage; got {lengths}")
        if sum(self.forward_bytes) != sum(self.backward_bytes):
            raise ValueError(
                f"forwards leave {sum(self.forward_bytes)} activation bytes alive but backwards release "
                f"{sum(self.backward_bytes)}: a micro-batch must release exactly what it took"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_bytes)

    @property
    def activation_bytes(self) -> int:
        """Activation bytes of one whole micro-batch (A in the closed forms)."""
        return sum(self.forward_bytes)

    @classmethod
    def equal(cls, stages: int, activation_bytes: int = 1, parameter_bytes: int = 1, flops: int = 1) -> StageCosts:
        """Return equal stages with the given costs per stage; a backward costs twice the flops of a forward."""
        same = (activation_bytes,) * stages
        return cls(same, same, (parameter_bytes,) * stages, (flops,) * stages, (2 * flops,) * stages)
