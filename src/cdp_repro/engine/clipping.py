"""Gradients scaled down so that their norm is at most a limit, over a stage or over all stages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from cdp_repro.engine.compute import Gradients
from cdp_repro.engine.transfers import Outgoing
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Program, Value
from cdp_repro.schedule.meaning import made_from
from cdp_repro.schedule.norms import can_clip, clips_globally, refusal, teller

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`: keeps a norm of 0 from dividing by zero."""

_FIRST_TAG = 8
"""Tag of the messages of stage 0; each stage has its own tag."""


class Clipping:
    """Scales the mean gradient of a stage down so that its norm, or the norm over all stages, is at most `limit`.

    For the norm over all stages, the rank that completes the sum of a stage sends its squared norm to the others. Like
    losses, these messages are not part of the program: a rank only waits for messages that were sent in an earlier
    slot.
    """

    def __init__(self, limit: float, program: Program, team: Team) -> None:
        """Check that gradients can be clipped.

        Raises:
            ValueError: the limit is not a finite number above 0, or a norm is not known where, or before, it is needed.
        """
        schedule = program.schedule
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
            raise ValueError(f"clip_norm={limit!r}: use a finite number above 0, such as clip_norm=1.0")
        if not can_clip(program):
            raise ValueError(refusal(schedule))
        self._limit, self._schedule, self._team = limit, schedule, team
        self.is_late = clips_globally(schedule)
        """Whether the norm is over all stages: it may still be unknown when one is updated, and the update waits."""
        self._squares: dict[int, dict[int, Tensor]] = {}
        """Squared norms, by the version made of the gradients and by stage, on the CPU in float64."""
        self._updating = {r for stage in range(schedule.stages) for r in schedule.placement.holders(stage)}
        """Ranks that need the norm; others would never receive it."""
        self._outgoing = Outgoing()
        self._lag = schedule.max_lead * schedule.sizes.updates
        """Number of versions by which one rank can be ahead of another."""

    def clipped(self, version: int, gradients: Gradients) -> Gradients:
        """Return copies of the mean gradient that makes a stage's `version`, by name, times min(1, limit / norm)."""
        norm = self._norm(version) if self.is_late else _squared_norm(gradients).sqrt()
        factor = (self._limit / (norm + _EPSILON)).clamp(max=1)
        return {name: gradient * factor.to(gradient) for name, gradient in gradients.items()}

    def enter(self, total: Value, gradients: Gradients) -> None:
        """Take note of a sum that this rank has added; if it is complete, and this rank its teller, tell the others."""
        version = made_from(self._schedule, total) if self.is_late else None
        if version is None or teller(self._schedule, version, total.stage) != self._team.rank:
            return
        square = _squared_norm(gradients).to("cpu", torch.float64).reshape(1)
        self._squares.setdefault(version, {})[total.stage] = square
        self._outgoing.let_go(before=version - self._lag)
        for rank in self._updating - {self._team.rank}:
            self._outgoing.send(square, rank, version, self._team.control, _FIRST_TAG + total.stage)

    def _norm(self, version: int) -> Tensor:
        """Return the norm over all stages."""
        squares = self._squares.setdefault(version, {})
        for stage in range(self._schedule.stages):
            if stage not in squares:
                squares[stage] = torch.empty(1, dtype=torch.float64)
                source = teller(self._schedule, version, stage)
                dist.recv(squares[stage], source, group=self._team.control, tag=_FIRST_TAG + stage)
        # stages are updated some versions apart, by less than twice the lag: none asks for one that is gone
        self._squares.pop(version - 2 * self._lag, None)
        return torch.cat([squares[stage] for stage in range(self._schedule.stages)]).sum().sqrt()

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        self._squares.clear()  # all updates have been made
        self._outgoing.flush()


def _squared_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the squares of all values; the order of summation does not depend on that of `gradients`."""
    real = [torch.view_as_real(each) if (each := gradients[name]).is_complex() else each for name in sorted(gradients)]
    found = [each.double().square().sum() for each in real]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)
