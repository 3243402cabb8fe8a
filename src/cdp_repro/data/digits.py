"""Handwritten digits: real scans that come with scikit-learn, so that a first run needs no download."""

from __future__ import annotations

import torch
from sklearn import datasets as sklearn_datasets

from cdp_repro.data.augment import CropAndFlip
from cdp_repro.data.in_memory import InMemoryDataset, Split

MEAN, STD = (0.305,), (0.376,)


def load_digits() -> InMemoryDataset:
    """Return the 1,797 digits of 8x8 pixels, one channel, split 80/20 in the same way for every run.

    They are the test part of the UCI set of Alpaydin and Kaynak (1998), with 0..16 scaled to 0..255. Every fifth image
    of a class, in file order, is a test image: the split is stratified and needs no random numbers.
    """
    raw = sklearn_datasets.load_digits()
    images = torch.from_numpy(raw.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(raw.target).long()
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        in_test[torch.nonzero(labels == digit).flatten()[4::5]] = True
    return InMemoryDataset(
        name="digits",
        description="handwritten digits, 8x8 pixels (scikit-learn)",
        classes=10,
        train=Split(images[~in_test], labels[~in_test]),
        test=Split(images[in_test], labels[in_test]),
        statistics=(MEAN, STD),
        augmentation=CropAndFlip(padding=1, flip=False),
    )
