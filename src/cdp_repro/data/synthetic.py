"""Images drawn from a seed: any size and number of classes, no files, and still learnable."""

from __future__ import annotations

import torch

from cdp_repro.data.in_memory import InMemoryDataset, Split
from cdp_repro.engine.randomness import generator

PATCHES = 8  # a class is a coarse picture of 8x8 patches
BRIGHTEST_PATCH = 159
BRIGHTEST_NOISE = 96  # the two add up to 255, so no uint8 overflows
MEAN, STD = (0.5, 0.5, 0.5), (0.22, 0.22, 0.22)


def load_synthetic(
    *, classes: int, train_samples: int, test_samples: int, image_size: int, seed: int
) -> InMemoryDataset:
    """Return RGB images: the picture of the class, the same in both splits, plus uniform noise.

    Only integers are used, so the bytes are the same on every machine. Sample k is of class k mod `classes`.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {"classes": classes, "train_samples": train_samples, "test_samples": test_samples, "image_size": image_size}
    for key, size in sizes.items():
        if size < 1:
            raise ValueError(f"dataset.{key}={size} must be at least 1")
    draw = generator("cpu", seed, "synthetic", "patches")
    patches = torch.randint(0, BRIGHTEST_PATCH + 1, (classes, 3, PATCHES, PATCHES), generator=draw, dtype=torch.uint8)
    nearest = torch.arange(image_size) * PATCHES // image_size
    pictures = patches[:, :, nearest[:, None], nearest]

    def split(part: str, samples: int) -> Split:
        labels = torch.arange(samples) % classes
        draw = generator("cpu", seed, "synthetic", part)
        shape = (samples, 3, image_size, image_size)
        noise = torch.randint(0, BRIGHTEST_NOISE + 1, shape, generator=draw, dtype=torch.uint8)
        return Split(noise.add_(pictures[labels]), labels)

    return InMemoryDataset(
        name="synthetic",
        description=f"synthetic images, {image_size}x{image_size} pixels, seed {seed}",
        classes=classes,
        train=split("train", train_samples),
        test=split("test", test_samples),
        statistics=(MEAN, STD),
        augmentation=None,
    )
