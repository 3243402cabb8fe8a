"""Evaluation on a test set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Return `eval/top1_percent`, `eval/top5_percent` and `eval/loss` (mean cross-entropy) over all samples."""
    correct1, correct5, loss, samples = 0.0, 0.0, 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in batches:
            with autocast():
                logits = model(inputs)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
            hits = ranked == targets[:, None]
            correct1 += hits[:, 0].sum().item()
            correct5 += hits.any(1).sum().item()
            loss += F.cross_entropy(logits, targets, reduction="sum").item()
            samples += len(targets)
    return {
        "eval/top1_percent": 100 * correct1 / samples,
        "eval/top5_percent": 100 * correct5 / samples,
        "eval/loss": loss / samples,
    }
