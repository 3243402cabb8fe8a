"""Which images a training step uses: a function of (seed, step), so that a resume needs no loader state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from cdp_repro.engine.randomness import generator
from cdp_repro.schedule.sizes import check_divisible


def steps_per_epoch(train_size: int, batch_size: int) -> int:
    """Return the number of whole mini-batches in the training set; the incomplete rest of an epoch is dropped.

    Raises:
        ValueError: not even one mini-batch fits, or `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if train_size < batch_size:
        raise ValueError(
            f"batch_size={batch_size} is larger than the training set of {train_size} samples; "
            f"use batch_size={max(train_size, 1)} or less"
        )
    return train_size // batch_size


def epoch_order(train_size: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of the training set, [train_size] int64, that this epoch goes through."""
    return torch.randperm(train_size, generator=generator("cpu", seed, "order", epoch))


def micro_batch_indices(
    steps: Iterable[int], *, train_size: int, batch_size: int, parts: int, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Return, lazily, (t, indices) for every t in `steps`; indices[i] are the samples of part i of its mini-batch.

    `parts` is the number of parts as in `Dataset.train_batches`. Indices are int64, [parts, batch_size / parts].

    Raises:
        ValueError: at once, not at the first step, if `parts` does not divide `batch_size` or no mini-batch fits.
    """
    check_divisible(batch_size, parts=parts)
    per_epoch = steps_per_epoch(train_size, batch_size)

    def rows() -> Iterator[tuple[int, Tensor]]:
        current, order = -1, torch.empty(0, dtype=torch.int64)
        for step in steps:
            epoch, batch = divmod(step, per_epoch)
            if epoch != current:
                current, order = epoch, epoch_order(train_size, seed, epoch)
            yield step, order[batch * batch_size : (batch + 1) * batch_size].view(parts, -1)

    return rows()
