"""Data parallelism by torch: rank i is worker i and runs every stage on micro-batch i."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cdp_repro.baselines.baseline import Baseline, Tensors
from cdp_repro.engine.batches import MiniBatch


class DataParallelBaseline(Baseline):
    """What DDP and FSDP2 have in common: one forward and one backward of the whole model on each rank."""

    _model: nn.Module

    def _place(self) -> None:
        for stage in self._stages:
            stage.worker = self.rank
            stage.to(self._device)
        self._model = self._distribute(nn.Sequential(*self._stages))

    @abstractmethod
    def _distribute(self, model: nn.Sequential) -> nn.Module:
        """Return the model as the library runs it."""

    def reads_inputs(self, worker: int) -> bool:
        """True for its own micro-batch."""
        return worker == self.rank

    def _gradients(self, batch: MiniBatch) -> Tensor:
        output = self._model(batch.inputs(self.rank))
        loss = self._loss(output, batch.targets(self.rank))
        loss.backward()  # type: ignore[no-untyped-call]
        return self._gather_losses(loss.detach())

    def _gather_losses(self, loss: Tensor) -> Tensor:
        """Return [N]: the losses of all workers on rank 0; elsewhere the rank's own, and NaN for the others."""
        losses = loss.new_full((self.workers,), float("nan"))
        losses[self.rank] = loss
        dist.gather(loss.reshape(1), list(losses.view(-1, 1)) if self.rank == 0 else None)
        return losses

    def _buffers(self) -> dict[tuple[int, int], Tensors]:
        return {(stage.number, self.rank): dict(stage.stage.named_buffers()) for stage in self._stages}


class DDPBaseline(DataParallelBaseline):
    """DistributedDataParallel with its defaults, except that each worker keeps its own buffers.

    A subclass may set `bucket_cap_mb`, the MiB of gradients that are reduced together.

    Every trainable parameter must take part in the loss: DDP is not told to look for unused ones.
    """

    name = "ddp"
    bucket_cap_mb: ClassVar[float] = 25

    def _distribute(self, model: nn.Sequential) -> nn.Module:
        # renamed after torch 2.11; the old name warns
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_cap_mb, **options)


class FSDP2Baseline(DataParallelBaseline):
    """`fully_shard` on every stage, then on the model: parameters, gradients and optimizer states are sharded.

    The optimizer gets DTensors, so it must work on shards, as SGD, Adam and AdamW do.
    """

    name = "fsdp2"

    def _distribute(self, model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh(self._device.type, (self.workers,))
        for stage in self._stages:
            # fully_shard accepts no channels_last parameters; a convolution takes its format from the images anyway
            stage.stage.to(memory_format=torch.contiguous_format)
            fully_shard(stage.stage, mesh=mesh)
        fully_shard(model, mesh=mesh)  # makes the model the root: else each stage would stay whole after its forward
        return model
