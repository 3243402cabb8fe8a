"""ImageNet, or any tree train/<class>/*, val/<class>/* of large images, decoded on the way to the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from cdp_repro.data.augment import Normalise
from cdp_repro.data.dataset import Dataset, Form, MiniBatch
from cdp_repro.data.decode import Sample, decode, unreadable
from cdp_repro.data.tree import scan_trees
from cdp_repro.engine.randomness import seeded

STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SPLITS = ("train", "val")


def load_imagenet(root: Path, *, image_size: int, loader_workers: int) -> Dataset:
    """Return the tree in `root`, with the transforms of He et al. (2016) as in torchvision's reference.

    Training: RandomResizedCrop(image_size), horizontal flip. Test: Resize(image_size * 256 / 224), CenterCrop.

    Raises:
        ValueError: a size below 1, a negative number of processes.
        DatasetError: the tree is missing or incomplete.
    """
    if image_size < 1 or loader_workers < 0:
        raise ValueError(
            f"dataset.image_size={image_size} must be at least 1 and dataset.loader_workers={loader_workers} at least 0"
        )
    return _ImageNet(root, image_size, loader_workers)


class _ImageNet(Dataset):
    name = "imagenet"

    def __init__(self, root: Path, image_size: int, loader_workers: int) -> None:
        help_text = (
            f"Expected {root}/train/<class>/* and {root}/val/<class>/* (png, jpg or jpeg, {root}/val sorted into\n"
            "the same class folders as train). Name another folder by dataset.root=/path/to/imagenet"
        )
        self._root = root
        self._train, self._test = scan_trees(root, SPLITS, help_text)
        self._image_size = image_size
        self._loader_workers = loader_workers
        self.classes = len(self._train.classes)
        self.input_shape = (3, image_size, image_size)
        self.train_size = len(self._train.files)
        self.test_size = len(self._test.files)
        self.description = (
            f"image tree, {self.classes:,} classes, {self.train_size:,} training and {self.test_size:,} test images"
        )

    def _mini_batches(
        self, order: Iterator[tuple[int, Tensor]], seed: int, form: Form, is_read: Callable[[int, int], bool]
    ) -> Iterator[MiniBatch]:
        """See `Dataset`. The loader runs ahead of the training by two mini-batches per process."""
        normalise = Normalise(STATISTICS, form)
        to_decode, to_return = tee(order)

        def samples(step: int, indices: Tensor, part: int) -> list[Sample]:
            return [
                Sample(self._train.files[index], (seed, "augment", step, part, position))
                for position, index in enumerate(indices[part].tolist())
            ]

        def read(step: int, indices: Tensor) -> list[int]:
            return [part for part in range(len(indices)) if is_read(step, part)]

        def mini_batch(step: int, indices: Tensor, images: Tensor) -> MiniBatch:
            parts_read = read(step, indices)
            shape = len(parts_read), indices.shape[1], *self.input_shape
            decoded = dict(zip(parts_read, images.view(shape), strict=True)) if parts_read else {}

            def decode_now(part: int) -> Tensor:
                (found,) = self._images([samples(step, indices, part)], form.device, processes=0)
                return found

            return _DecodedMiniBatch(step, decoded, self._train.labels[indices], normalise, decode_now)

        requests = ([s for part in read(*entry) for s in samples(*entry, part)] for entry in to_decode)
        loaded = self._images(requests, form.device, self._loader_workers)
        return (mini_batch(*entry, images) for entry, images in zip(to_return, loaded, strict=True))

    def _test_batches(self, batches: Sequence[slice], form: Form) -> Iterator[tuple[Tensor, Tensor]]:
        normalise = Normalise(STATISTICS, form)
        loaded = self._images(
            ([Sample(file) for file in self._test.files[batch]] for batch in batches), form.device, self._loader_workers
        )
        for batch, images in zip(batches, loaded, strict=True):
            yield normalise(images), self._test.labels[batch].to(form.device, copy=True)

    def fingerprint(self) -> str:
        """Return a hash of the names of all files, so that a run can go on after a damaged file is replaced."""
        digest = hashlib.blake2b(digest_size=8)
        for file in (*self._train.files, *self._test.files):
            digest.update(repr(Path(file).relative_to(self._root).parts).encode())
        return digest.hexdigest()

    def _images(self, requests: Iterable[list[Sample]], device: torch.device, processes: int) -> Iterator[Tensor]:
        transform = _Transform(self._image_size)
        pin_memory = device.type == "cuda"
        for images, failures in decode(requests, transform, processes=processes, pin_memory=pin_memory):
            if failures:
                raise unreadable(failures)
            yield images


class _Transform:
    """From an image to [3, image_size, image_size] uint8: augmented if there are keys, else the centre crop."""

    def __init__(self, image_size: int) -> None:
        self._train = v2.Compose([v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()])
        self._test = v2.Compose([v2.Resize(round(image_size * 256 / 224), antialias=True), v2.CenterCrop(image_size)])

    def __call__(self, image: Image.Image, keys: tuple[int | str, ...]) -> Tensor:
        if not keys:
            return torch.as_tensor(v2.functional.pil_to_tensor(self._test(image)))
        with seeded(torch.device("cpu"), *keys):
            return torch.as_tensor(v2.functional.pil_to_tensor(self._train(image)))


@dataclass(frozen=True, eq=False)
class _DecodedMiniBatch:
    """`MiniBatch` over augmented uint8 images on the CPU, decoded ahead or else when they are asked for."""

    step: int
    images: Mapping[int, Tensor]
    """[B/M, c, h, w] by micro-batch of the step."""
    labels: Tensor
    """[M, B/M]."""
    normalise: Normalise
    decode_now: Callable[[int], Tensor]
    """Decodes the images of a micro-batch that were not decoded ahead."""

    def inputs(self, part: int) -> Tensor:
        images = self.images.get(part)
        return self.normalise(self.decode_now(part) if images is None else images)

    def targets(self, part: int) -> Tensor:
        return self.labels[part].to(self.normalise.device, copy=True)
