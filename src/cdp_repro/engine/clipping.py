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
from cdp_repro.schedule import Program, Schedule, Value
from cdp_repro.schedule.meaning import made_from
from cdp_repro.schedule.norms import can_clip, clips_globally, refusal, teller

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`: keeps a norm of 0 from dividing by zero."""

_FIRST_TAG = 8
"""Tag of the messages of stage 0; each stage has its own tag."""


class Clipping:
    """Clips each stage by its own norm, to at most `limit`."""

    is_late = False
    """Whether the factor may still be unknown when a stage is updated, so that the update must wait."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def clipped(self, version: int, gradients: Gradients) -> Gradients:
        """Return copies of the mean gradient that makes a stage's `version`, by name, times min(1, limit / norm)."""
        factor = (self._limit / (self._norm(version, gradients) + _EPSILON)).clamp(max=1)
        return {name: gradient * factor.to(gradient) for name, gradient in gradients.items()}

    def _norm(self, version: int, gradients: Gradients) -> Tensor:  # noqa: ARG002 - of a stage, whatever the version
        return _squared_norm(gradients).sqrt()

    def enter(self, total: Value, gradients: Gradients) -> None:
        """Take note of a sum that this rank has added."""

    def flush(self) -> None:
        """Wait until all messages have been sent."""


class GlobalClipping(Clipping):
    """Clips all stages by the norm over all of them.

    The rank that completes the sum of a stage sends its squared norm to the others. Like losses, these messages are not
    part of the program: a rank only waits for messages that were sent in an earlier slot.
    """

    is_late = True

    def __init__(self, limit: float, schedule: Schedule, team: Team) -> None:
        super().__init__(limit)
        self._schedule, self._team = schedule, team
        self._squares: dict[int, dict[int, Tensor]] = {}
        """Squared norms, by the version made of the gradients and by stage, on the CPU in float64."""
        self._updating = {r for stage in range(schedule.stages) for r in schedule.placement.holders(stage)}
        """Ranks that need the norm; others would never receive it."""
        self._outgoing = Outgoing()
        self._lag = schedule.max_lead * schedule.sizes.updates
        """Number of versions by which one rank can be ahead of another."""

    def enter(self, total: Value, gradients: Gradients) -> None:
        """See `Clipping.enter`; tell the others if the sum is complete and this rank is its teller."""
        version = made_from(self._schedule, total)
        if version is None or teller(self._schedule, version, total.stage) != self._team.rank:
            return
        square = _squared_norm(gradients).to("cpu", torch.float64).reshape(1)
        self._squares.setdefault(version, {})[total.stage] = square
        self._outgoing.let_go(before=version - self._lag)
        for rank in self._updating - {self._team.rank}:
            self._outgoing.send(square, rank, version, self._team.control, _FIRST_TAG + total.stage)

    def _norm(self, version: int, gradients: Gradients) -> Tensor:  # noqa: ARG002 - of all stages
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
        """See `Clipping.flush`."""
        self._squares.clear()  # all updates have been made
        self._outgoing.flush()


def clipping(limit: float, program: Program, team: Team) -> Clipping:
    """Return the clipping for a program: by stage if a new version is read before all sums are complete, else global.

    Raises:
        ValueError: the limit is not a finite number above 0, or a norm is not known where, or before, it is needed.
    """
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
        raise ValueError(f"clip_norm={limit!r}: use a finite number above 0, such as clip_norm=1.0")
    if not can_clip(program):
        raise ValueError(refusal(program.schedule))
    return GlobalClipping(limit, program.schedule, team) if clips_globally(program.schedule) else Clipping(limit)


def _squared_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the squares of all values; the order of summation does not depend on that of `gradients`."""
    real = [torch.view_as_real(each) if (each := gradients[name]).is_complex() else each for name in sorted(gradients)]
    found = [each.double().square().sum() for each in real]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)
