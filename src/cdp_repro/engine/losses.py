"""The losses of each training step, brought together on rank 0.

They are for people and logs, not a part of training: their messages are not in the schedule.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.transfers import Outgoing, Transfer
from cdp_repro.schedule import Schedule

_TAG = 1


class Losses:
    """Losses by training step; on rank 0 those of all ranks.

    `group` is a gloo group of all ranks; None on a single device.
    """

    def __init__(self, schedule: Schedule, rank: int, group: dist.ProcessGroup | None) -> None:
        self._schedule = schedule
        self._rank = rank
        self._group = group
        self._known: dict[int, dict[int, Tensor]] = {}
        self._outgoing = Outgoing()
        self._lag = schedule.rule.longest + 1
        """Finished steps after which rank 0 has come to the losses of a step, in any mode: it updates the later, the
        older the parameters are that it reads."""

    def enter(self, step: int, worker: int, loss: Tensor) -> None:
        """Enter the loss (a scalar) of a micro-batch that this rank has computed."""
        self._known.setdefault(step, {})[worker] = loss
        if self._rank and self._group:
            value = loss.detach().to("cpu", torch.float64).reshape(1)
            self._outgoing.append(Transfer.of(value, dist.isend(value, 0, group=self._group, tag=_TAG)), step)

    def flush(self) -> None:
        """Wait until all have been sent."""
        self._outgoing.flush()

    def of(self, step: int) -> Tensor:
        """Return the losses of the micro-batches, [kN], of a step that is finished; rank 0 waits for all."""
        self._outgoing.let_go(before=step - self._lag)
        known = self._known.pop(step, {})
        if self._rank == 0:
            known |= {worker: self._received(source) for worker, source in self._elsewhere(step)}
        like = next(iter(known.values()), torch.zeros(()))
        missing = torch.full_like(like, torch.nan)
        losses = torch.stack([known.get(worker, missing).to(like) for worker in range(self._schedule.micro_batches)])
        return losses.view(-1, self._schedule.sizes.replicas).mean(1)

    def _elsewhere(self, step: int) -> list[tuple[int, int]]:
        """Return (micro-batch, rank) of each loss of a step that another rank computes, in the order they are sent."""
        schedule, last_stage = self._schedule, self._schedule.stages - 1
        first, replicas = step * schedule.micro_batches, schedule.sizes.replicas
        computed = sorted(  # forwards may run in another order than micro-batches are numbered
            range(schedule.micro_batches), key=lambda i: (schedule.timeline.forward(i // replicas, last_stage), i)
        )
        ranks = {i: schedule.placement.rank_of(first + i, last_stage) for i in computed}
        return [(i, rank) for i, rank in ranks.items() if rank]

    def _received(self, source: int) -> Tensor:
        value = torch.empty(1, dtype=torch.float64)
        dist.recv(value, source, group=self._group, tag=_TAG)
        return value[0]
