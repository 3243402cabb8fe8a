"""Data sets that fit on the device: one uint8 tensor, gathered, augmented and normalised there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdp_repro.data.augment import CropAndFlip, Normalise, Statistics
from cdp_repro.data.dataset import Dataset, Form, MiniBatch
from cdp_repro.engine.randomness import generator

Augment = Callable[[Tensor, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Split:
    """Images [n, c, h, w] uint8 and their class numbers [n] int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"images are {images.dtype} {[*images.shape]}: give torch.uint8 [n, c, h, w], such as "
                "(255 * images).round().to(torch.uint8) for numbers from 0 to 1"
            )
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise ValueError(
                f"class numbers are {labels.dtype} {[*labels.shape]}: give torch.int64 [n], by labels.long()"
            )
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{len(self.images)} images have {len(self.labels)} class numbers: give one for each image"
            )

    def to(self, device: torch.device) -> Split:
        """Return this split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))


class InMemoryDataset(Dataset):
    """A data set held as one uint8 tensor for training and one for testing."""

    def __init__(
        self,
        *,
        name: str,
        description: str,
        classes: int,
        train: Split,
        test: Split,
        statistics: Statistics,
        augmentation: CropAndFlip | None,
    ) -> None:
        """Check that the splits belong together.

        Raises:
            ValueError: a class number is not below `classes`, or test images have another shape.
        """
        _refuse_unlike(train, test, classes)
        self.name = name
        self.description = description
        self.classes = classes
        channels, height, width = train.images.shape[1:]
        self.input_shape = (channels, height, width)
        self.train_size = len(train.labels)
        self.test_size = len(test.labels)
        self._train = train
        self._test = test
        self._statistics = statistics
        self._augmentation = augmentation
        self._on_device: dict[torch.device, tuple[Split, Split]] = {}

    def _mini_batches(
        self,
        order: Iterator[tuple[int, Tensor]],
        seed: int,
        form: Form,
        is_read: Callable[[int, int], bool],  # noqa: ARG002 - images are gathered when they are asked for
    ) -> Iterator[MiniBatch]:
        train, _ = self._splits(form.device)
        normalise = Normalise(self._statistics, form)

        def augment(images: Tensor, step: int, part: int) -> Tensor:
            if self._augmentation is None:
                return images
            return self._augmentation(images, generator("cpu", seed, "augment", step, part))

        return (
            _InMemoryMiniBatch(step, indices.to(form.device, non_blocking=True), train, augment, normalise)
            for step, indices in order
        )

    def _test_batches(self, batches: Sequence[slice], form: Form) -> Iterator[tuple[Tensor, Tensor]]:
        _, test = self._splits(form.device)
        normalise = Normalise(self._statistics, form)
        for batch in batches:
            yield normalise(test.images[batch]), test.labels[batch].clone()

    def fingerprint(self) -> str:
        """Return a hash of the sizes, images and class numbers of both splits."""
        digest = hashlib.blake2b(repr((self.name, self.classes)).encode(), digest_size=8)
        for tensor in (self._train.images, self._train.labels, self._test.images, self._test.labels):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def _splits(self, device: torch.device) -> tuple[Split, Split]:
        if device not in self._on_device:
            self._on_device[device] = self._train.to(device), self._test.to(device)
        return self._on_device[device]


def _refuse_unlike(train: Split, test: Split, classes: int) -> None:
    shapes = [[*split.images.shape[1:]] for split in (train, test)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"training images are {shapes[0]}, test images {shapes[1]}: give both one shape")
    labels = torch.cat([train.labels, test.labels])
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"class numbers are from {labels.min()} to {labels.max()}, with classes={classes}: give numbers from 0 to "
            f"{classes - 1}"
        )


@dataclass(frozen=True, eq=False)
class _InMemoryMiniBatch:
    """`MiniBatch` over a split; indices [M, B/M] lie on the split's device."""

    step: int
    indices: Tensor
    split: Split
    augment: Augment
    normalise: Normalise

    def inputs(self, part: int) -> Tensor:
        images = self.split.images.index_select(0, self.indices[part])
        return self.normalise(self.augment(images, self.step, part))

    def targets(self, part: int) -> Tensor:
        return self.split.labels.index_select(0, self.indices[part])
