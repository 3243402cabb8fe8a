"""The interface of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cdp_repro.data.order import micro_batch_indices
from cdp_repro.engine import batches


class DatasetError(ValueError):
    """The data on disk cannot be used: missing, incomplete or damaged. The message names a remedy."""


class MiniBatch(batches.MiniBatch, Protocol):
    """The mini-batch of one training step: images [B/M, channels, height, width], class numbers [B/M] (int64); for
    text, tokens and their successors, [B/M, context] each (int64).

    It is cut along its samples only. The engine itself cuts these parts into slices; then M / L stands for M here.
    Micro-batches may be asked for in any order, any number of times, and are always the same.
    """

    @property
    def step(self) -> int:
        """Training step t that this mini-batch belongs to."""


def read_all(step: int, part: int) -> bool:  # noqa: ARG001 - a rule with another answer asks for both
    """Return True: one process reads every micro-batch of every step."""
    return True


@dataclass(frozen=True)
class Form:
    """Where samples are wanted, and how images are stored there. Tokens are int64, whatever it says."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


class Dataset(ABC):
    """Samples, in a training and a test set: images with one class each, or sequences of tokens.

    Attributes:
        name: its name for `load_dataset`.
        description: what the data is, worded for a table of results.
        classes: number of classes; for text, of different tokens.
        input_shape: (channels, height, width) of one image as the model sees it; for text (context,).
        train_size: number of training samples.
        test_size: number of test samples.
    """

    name: str
    description: str
    classes: int
    input_shape: tuple[int, ...]
    train_size: int
    test_size: int

    def train_batches(
        self,
        steps: Iterable[int],
        *,
        batch_size: int,
        parts: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        is_read: Callable[[int, int], bool] = read_all,
    ) -> Iterator[MiniBatch]:
        """Return, lazily, one mini-batch for every training step number in `steps`.

        Step t is batch t mod `steps_per_epoch` of epoch t // `steps_per_epoch`. The order of an epoch depends on
        (seed, epoch) only, augmentation on (seed, step, part) only.

        `parts` is the number of equal parts that a mini-batch is cut into along its samples; without slices, these
        are its micro-batches. `is_read(step, part)` tells whether this rank will ask for the inputs of a part. Images
        that must be decoded are decoded ahead for these parts only, and for other parts when their inputs are asked
        for.

        Raises:
            ValueError: `parts` does not divide `batch_size`, or the training set is smaller than `batch_size`.
            DatasetError: an image is damaged (data sets that are decoded during training).
        """
        order = micro_batch_indices(steps, train_size=self.train_size, batch_size=batch_size, parts=parts, seed=seed)
        return self._mini_batches(order, seed, Form(device, dtype, channels_last), is_read)

    @abstractmethod
    def _mini_batches(
        self, order: Iterator[tuple[int, Tensor]], seed: int, form: Form, is_read: Callable[[int, int], bool]
    ) -> Iterator[MiniBatch]:
        """Return the mini-batches of `train_batches`; `order` gives the step and the indices [parts, B / parts]."""

    def test_batches(
        self,
        batch_size: int,
        numbers: Iterable[int] | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return (inputs, targets) of the test batches with these numbers; by default of all, in order.

        Images [n, channels, height, width] in `dtype` with class numbers [n] int64, or tokens [n, context] int64 with
        the tokens after them [n, context]; n <= `batch_size`, and the last batch may be short.
        """
        return self._test_batches(self._test_slices(batch_size, numbers), Form(device, dtype, channels_last))

    @abstractmethod
    def _test_batches(self, batches: Sequence[slice], form: Form) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test samples of each slice."""

    def _test_slices(self, batch_size: int, numbers: Iterable[int] | None) -> list[slice]:
        """Return the test samples of each batch with one of these numbers, as slices; by default of all batches."""
        firsts = range(0, self.test_size, batch_size)
        chosen = range(len(firsts)) if numbers is None else numbers
        return [slice(firsts[number], min(firsts[number] + batch_size, self.test_size)) for number in chosen]

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation to log, from `eval/top1_percent`, `eval/top5_percent` and `eval/loss`."""
        return {**means}

    @abstractmethod
    def fingerprint(self) -> str:
        """Return 16 hex digits that identify the data: equal for equal data on every machine."""
