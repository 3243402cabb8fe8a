"""Evaluation on a test set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """Sums over the targets of a test set; scores of parts of it add up."""

    correct1: float = 0.0
    correct5: float = 0.0
    loss: float = 0.0
    targets: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """Return `eval/top1_percent`, `eval/top5_percent` and `eval/loss` (mean cross-entropy)."""
        return {
            "eval/top1_percent": 100 * self.correct1 / self.targets,
            "eval/top5_percent": 100 * self.correct5 / self.targets,
            "eval/loss": self.loss / self.targets,
        }


def score_of(outputs: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Return the score of all outputs: logits [B, ..., classes] for targets [B, ...]."""
    score = Score()
    for logits, targets in outputs:
        logits = (logits if logits.dtype == torch.float64 else logits.float()).flatten(0, -2)
        targets = targets.flatten()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum").item()
        score += Score(hits[:, 0].sum().item(), hits.any(1).sum().item(), loss, len(targets))
    return score
