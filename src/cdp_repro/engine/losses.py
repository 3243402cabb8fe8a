"""The losses of each training step, gathered on rank 0.

They are for people and logs, not part of training: their messages are not in the program.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.transfers import Outgoing
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Schedule

_FIRST_TAG = 1 << 20
"""Tag of the losses of micro-batch 0; each micro-batch of a step has its own tag."""


class Losses:
    """Losses by training step; on rank 0 those of all ranks."""

    def __init__(self, schedule: Schedule, team: Team) -> None:
        self._schedule, self._team = schedule, team
        self._known: dict[int, dict[int, Tensor]] = {}
        self._outgoing = Outgoing()

    def enter(self, step: int, i: int, loss: Tensor) -> None:
        """Enter the loss, [] (a scalar), of the step's i-th micro-batch, which this rank has computed."""
        self._known.setdefault(step, {})[i] = loss
        if self._team.rank:
            value = loss.detach().to("cpu", torch.float64).reshape(1)
            self._outgoing.send(value, 0, step, self._team.control, _FIRST_TAG + i)

    def flush(self) -> None:
        """Wait until all losses have been sent."""
        self._outgoing.flush()

    def mean_losses(self, step: int) -> Tensor:
        """Return the losses of a finished step, [M/R], each a mean over replicas; rank 0 waits for all of them.

        They are float64: as received losses are, so that a mean does not depend on the rank of each.
        """
        schedule = self._schedule
        self._outgoing.let_go(before=step - schedule.max_lead)  # rank 0 must have received those
        known = self._known.pop(step, {})
        if self._team.rank == 0:
            first, last_stage = step * schedule.micro_batches, schedule.stages - 1
            ranks = [schedule.placement.rank_of(first + i, last_stage) for i in range(schedule.micro_batches)]
            known |= {i: self._received(rank, i) for i, rank in enumerate(ranks) if rank}
        like = next(iter(known.values()), torch.zeros(()))
        losses = like.new_full((schedule.micro_batches,), torch.nan, dtype=torch.float64)
        for i, loss in known.items():  # only a rank's own, so that they cost no more with more ranks
            losses[i] = loss
        return losses.view(-1, schedule.sizes.replicas).mean(1)

    def _received(self, source: int, i: int) -> Tensor:
        value = torch.empty(1, dtype=torch.float64)
        dist.recv(value, source, group=self._team.control, tag=_FIRST_TAG + i)
        return value[0]
