"""The cost of one action: the numbers that `simulate` needs, measured or assumed."""

from __future__ import annotations

from dataclasses import dataclass

from cdp_repro.schedule.parts import part_of
from cdp_repro.schedule.values import Kind, Value


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage on one micro-batch; every tuple has one entry a stage.

    Costs that default to 0 only matter if stages are on several ranks.
    """

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
    output_bytes: tuple[int, ...] = ()
    """Bytes of the stage's output, which another stage reads; 0 for the last stage."""
    output_kept: tuple[bool, ...] = ()
    """Whether the stage's own backward needs its output."""
    input_kept: tuple[bool, ...] = ()
    """Whether `x_j` is needed by the backward of the stage that reads it. In a chain that is stage j, and `x_j` is the
    output of the stage before."""
    gradient_bytes: tuple[int, ...] = ()
    """Bytes of the gradients of the stage's parameters."""
    input_gradient_bytes: tuple[int, ...] = ()
    """Bytes of the gradient of `x_j`, as in `input_kept`; 0 if the loss does not depend on parameters before it."""
    buffer_bytes: tuple[int, ...] = ()
    """Bytes of one worker's buffers of the stage (BatchNorm's running statistics)."""
    prefix_bytes: tuple[int, ...] = ()
    """If sequences are cut: activation bytes that the forward leaves alive, and the backward releases, beyond those of
    the first slice, for each earlier slice. Layers that look back keep all tokens so far. FLOPs are then means."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value:
                object.__setattr__(self, name, (0,) * len(self.forward_bytes))
        lengths = {name: len(value) for name, value in vars(self).items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"every cost needs one entry a stage; got {lengths}")
        if sum(self.forward_bytes) != sum(self.backward_bytes):
            raise ValueError(
                f"forwards leave {sum(self.forward_bytes)} activation bytes alive but backwards release "
                f"{sum(self.backward_bytes)}: a micro-batch must release exactly what it took. A stage that "
                "computes with a tensor of its own, neither parameter nor buffer, keeps it: use register_buffer"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_bytes)

    @property
    def activation_bytes(self) -> int:
        """Activation bytes of one whole micro-batch (A in the closed forms)."""
        return sum(self.forward_bytes)

    def bytes_of(self, value: Value) -> int:
        """Return the bytes of a value that ranks send or hold; a value of 0 bytes is never sent.

        The bytes of SAVED are not known separately: see `forward_bytes`.
        """
        kind, stage = value.kind, value.stage
        if kind == Kind.INPUT:
            size = self.output_bytes[stage - 1]
        elif kind == Kind.OUTPUT_GRADIENT:
            size = self.input_gradient_bytes[stage + 1]
        elif kind == Kind.GRADIENTS:
            size = self.gradient_bytes[stage]
        else:
            size = (self.buffer_bytes if kind == Kind.BUFFERS else self.parameter_bytes)[stage]
        return size if value.parts == 1 else len(part_of(size, value.part, value.parts))

    def received_bytes(self, stage: int) -> tuple[int, int]:
        """Return the extra bytes that the forward takes, and the backward releases, if `x_j`, j = `stage`, is received.

        Forward and backward are those that read `x_j`. It is then a copy, not shared with the stage that made it.
        """
        before = self.output_bytes[stage - 1]
        made_and_kept, kept = self.output_kept[stage - 1], self.input_kept[stage]
        return before * (kept or not made_and_kept), before * (kept and made_and_kept)

    def released_by_sending(self, stage: int) -> int:
        """Return the live activation bytes that are released when the output of `stage` is sent to another rank."""
        return 0 if self.output_kept[stage] else self.output_bytes[stage]

    @classmethod
    def equal(cls, stages: int, activation_bytes: int = 1, parameter_bytes: int = 1, flops: int = 1) -> StageCosts:
        """Return equal stages with the given costs per stage; a backward costs twice the flops of a forward."""
        each = (activation_bytes,) * stages
        between = (activation_bytes,) * (stages - 1)
        return cls(
            forward_bytes=each,
            backward_bytes=each,
            parameter_bytes=(parameter_bytes,) * stages,
            forward_flops=(flops,) * stages,
            backward_flops=(2 * flops,) * stages,
            output_bytes=(*between, 0),
            output_kept=(True,) * stages,
            gradient_bytes=(parameter_bytes,) * stages,
            input_gradient_bytes=(0, *between),
        )
