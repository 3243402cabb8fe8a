"""Pipelines by torch.distributed.pipelining: rank j holds stage j and runs it on all micro-batches.

Both schedules flush: the pipeline is empty at every update, which makes them data parallelism by another route.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from cdp_repro.baselines.baseline import Baseline, Tensors
from cdp_repro.baselines.worker_stage import WorkerStage
from cdp_repro.engine.batches import MiniBatch
from cdp_repro.engine.binding import Binding
from cdp_repro.launch import control_messages


class PipelinedStage(nn.Module):
    """A stage as the library calls it: micro-batch after micro-batch, each with the buffers of its worker.

    Buffers are swapped in, not written to: autograd saves those of BatchNorm until the backward.
    """

    def __init__(self, stage: WorkerStage, workers: int) -> None:
        super().__init__()
        self.next_worker = 0
        self.worker_buffers: list[Tensors] = [
            {name: buffer.detach().clone() for name, buffer in stage.stage.named_buffers()} for _ in range(workers)
        ]
        self._stage = stage
        self._binding = Binding(stage.stage)
        self._in_place: Tensors = dict(stage.stage.named_parameters())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output, [micro-batch, ...], for the inputs of the next worker, [micro-batch, ...]."""
        self._stage.worker = self.next_worker
        self.next_worker += 1
        return self._run(inputs, self.worker_buffers[self._stage.worker])

    def rehearse(self, inputs: Tensor) -> Tensor:
        """Return an output, [micro-batch, ...], as `forward` returns it, and change nothing."""
        return self._run(inputs, {name: buffer.clone() for name, buffer in self.worker_buffers[0].items()})

    def _run(self, inputs: Tensor, buffers: Tensors) -> Tensor:
        with self._binding.bound(self._in_place, buffers):
            output: Tensor = self._stage(inputs)
        return output.contiguous()  # channels_last cannot be sent


class PipelineBaseline(Baseline):
    """One stage a rank: N stages and N micro-batches.

    The library makes its receive buffers once, so all micro-batches must have the shape of the first. On another shape
    rank 0 raises ValueError; the other ranks then wait for it and must be ended.
    """

    _schedule_class: ClassVar[type[PipelineScheduleSingle]]

    def _place(self) -> None:
        if len(self._stages) != self.workers:
            raise ValueError(
                f"{self.name} runs one stage on each rank: {len(self._stages)} stages do not fit {self.workers} ranks; "
                f"cut the model into {self.workers} stages"
            )
        self._is_first, self._is_last = self.rank == 0, self.rank == self.workers - 1
        self._stages = [self._stages[self.rank].to(self._device)]
        self._module = PipelinedStage(self._stages[0], self.workers)
        self._schedule: PipelineScheduleSingle | None = None
        self._shape: torch.Size | None = None

    def reads_inputs(self, worker: int) -> bool:  # noqa: ARG002 - the first stage runs all micro-batches
        """True on the rank of the first stage."""
        return self._is_first

    def _gradients(self, batch: MiniBatch) -> Tensor:
        # whole mini-batches, which the library cuts again: torch 2.11 does not accept micro-batches
        inputs = torch.cat([batch.inputs(i) for i in range(self.workers)]) if self._is_first else None
        targets = torch.cat([batch.targets(i) for i in range(self.workers)]) if self._is_last else None
        if self._schedule is None:
            self._schedule = self._build_schedule(None if inputs is None else inputs.chunk(self.workers)[0])
            self._shape = inputs.shape if inputs is not None else None
        if inputs is not None and inputs.shape != self._shape:
            raise ValueError(
                f"mini-batches of shape {tuple(inputs.shape)} after {tuple(self._shape or ())}: {self.name} takes one"
            )
        losses: list[Tensor] = []
        self._module.next_worker = 0
        self._schedule.step(*([] if inputs is None else [inputs]), target=targets, losses=losses, return_outputs=False)
        return self._send_losses(losses)

    def _send_losses(self, losses: list[Tensor]) -> Tensor:
        """Return [N]: all losses on the last rank, which has computed them, and on rank 0; NaN elsewhere."""
        # float64 for any dtype of the loss, which only the last rank knows
        known = torch.full((self.workers,), float("nan"), dtype=torch.float64, device=self._device)
        if self._is_last:
            known = torch.stack(losses).detach().double()
        if self._is_last and not self._is_first:
            dist.send(known, 0)
        elif self._is_first and not self._is_last:
            dist.recv(known, self.workers - 1)
        return known

    def _build_schedule(self, inputs: Tensor | None) -> PipelineScheduleSingle:
        """Rehearse the pipeline once, rank after rank, to find the shapes that are sent; `inputs` on rank 0 only.

        The library can find them itself, but in torch 2.11 that changes the buffers of BatchNorm.
        """
        if inputs is None:
            looks, requires_grad = control_messages.receive(self.rank - 1, self.team.control)
            inputs = control_messages.empty(looks, self._device).zero_().requires_grad_(requires_grad)
        output = self._module.rehearse(inputs)
        if not self._is_last:
            described = control_messages.looks_of(output), output.requires_grad
            control_messages.send(described, self.rank + 1, self.team.control)
        stage = PipelineStage(
            self._module, self.rank, self.workers, self._device, input_args=_bare(inputs), output_args=_bare(output)
        )
        # scale_grads: the library adds the gradients of the micro-batches, then divides them by their number
        return self._schedule_class(stage, self.workers, self._loss, scale_grads=True)

    def _buffers(self) -> dict[tuple[int, int], Tensors]:
        return {(self.rank, worker): buffers for worker, buffers in enumerate(self._module.worker_buffers)}


class GPipeBaseline(PipelineBaseline):
    """ScheduleGPipe: all forwards, then all backwards."""

    name = "torch_gpipe"
    _schedule_class = ScheduleGPipe


class OneFOneBBaseline(PipelineBaseline):
    """Schedule1F1B: one forward, one backward, as soon as the pipeline is full."""

    name = "torch_1f1b"
    _schedule_class = Schedule1F1B


def _bare(tensor: Tensor) -> Tensor:
    """Return a tensor like this one, without values."""
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
