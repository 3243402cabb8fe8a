"""CIFAR-10 (Krizhevsky, 2009), from the official python batches or from a tree of image files."""

from __future__ import annotations

import http.client
import tarfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

from cdp_repro.data.augment import CropAndFlip
from cdp_repro.data.dataset import DatasetError
from cdp_repro.data.decode import Sample, decode, unreadable
from cdp_repro.data.in_memory import InMemoryDataset, Split
from cdp_repro.data.tree import ImageTree, scan_trees
from cdp_repro.observe.locked_folder import alone_in
from cdp_repro.observe.text import several

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGE_SIZE = 32
CHUNK = 1000  # images that a process decodes at a time
FULL_SIZE = (50_000, 10_000)
SPLITS = ("train", "test")
BATCHES = "cifar-10-batches-py"
DOWNLOAD_ERRORS = (OSError, RuntimeError, EOFError, tarfile.TarError, http.client.HTTPException)


def load_cifar10(root: Path, *, download: bool, loader_workers: int) -> InMemoryDataset:
    """Return CIFAR-10 from `root`: the python batches, or else an image tree, or else a download.

    Raises:
        DatasetError: nothing there, several trees, a half-unpacked folder, damaged files, or a failed download.
    """
    parent = root.parent if root.name == BATCHES else root
    if (parent / BATCHES).is_dir():
        return _from_batches(parent, download)
    candidates = [folder for folder in (root, *_folders(root)) if any((folder / split).is_dir() for split in SPLITS)]
    complete = [folder for folder in candidates if all((folder / split).is_dir() for split in SPLITS)]
    if root in complete or len(complete) == 1:
        return _from_tree(root if root in complete else complete[0], root, loader_workers)
    if complete:
        choices = "\n".join(f"  dataset.root={folder}" for folder in complete[:5])
        raise DatasetError(f"{root} holds {len(complete)} image trees; choose one, for example:\n{choices}")
    if download:
        return _from_batches(parent, download)
    if candidates:
        return _from_tree(candidates[0], root, loader_workers)  # raises, and says what is missing
    raise DatasetError(f"CIFAR-10 not found: {_contents(root)}.\n{_help(root)}")


def _from_batches(root: Path, download: bool) -> InMemoryDataset:
    try:
        with alone_in(root) if download else nullcontext():  # other ranks then find the files of the first
            train, test = (CIFAR10(root, train=train, download=download) for train in (True, False))
    except DOWNLOAD_ERRORS as error:
        raise DatasetError(_batches_message(root, download, error)) from error
    return _dataset("CIFAR-10 (python batches)", len(train.classes), _split(train), _split(test))


def _batches_message(root: Path, download: bool, error: Exception) -> str:
    """Name the official files that are missing or damaged; torchvision does not name them."""
    folder = root / BATCHES
    expected = [*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]]
    wrong = [
        f"{name} ({'damaged' if (folder / name).is_file() else 'missing'})"
        for name, md5 in expected
        if not check_integrity(folder / name, md5)
    ]
    failed = f"the download of CIFAR-10 into {root} failed: {error}\n" if download else ""
    return f"{failed}{len(wrong)} of {len(expected)} files in {folder} are unusable: {several(wrong)}.\n{_help(root)}"


def _split(source: CIFAR10) -> Split:
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2)  # contiguous: torchvision holds a view of [n, 3, 32, 32]
    return Split(images, torch.tensor(source.targets))


def _from_tree(folder: Path, root: Path, loader_workers: int) -> InMemoryDataset:
    train, test = scan_trees(folder, SPLITS, _help(root))
    for split, tree in zip(SPLITS, (train, test), strict=True):
        _require_equal_classes(folder / split, tree)
    images = _read_images((*train.files, *test.files), loader_workers)
    return _dataset(
        _describe_tree(train, test),
        len(train.classes),
        Split(images[: len(train.files)], train.labels),
        Split(images[len(train.files) :], test.labels),
    )


def _require_equal_classes(folder: Path, tree: ImageTree) -> None:
    """Refuse classes of unequal size: those of CIFAR-10 are all equal, those of a half-unpacked archive are not."""
    sizes = torch.bincount(tree.labels, minlength=len(tree.classes)).tolist()
    if len(set(sizes)) > 1:
        fewest, most = min(sizes), max(sizes)
        raise DatasetError(
            f"the images in {folder} are incomplete: {tree.classes[sizes.index(fewest)]} has {fewest:,} images, "
            f"{tree.classes[sizes.index(most)]} has {most:,}, and all classes of CIFAR-10 have the same number. "
            "Unpack the archive again"
        )


def _describe_tree(train: ImageTree, test: ImageTree) -> str:
    lossless = all(file.lower().endswith(".png") for file in (*train.files, *test.files))
    sizes = len(train.files), len(test.files)
    count = "" if sizes == FULL_SIZE else f", {sizes[0]:,} training and {sizes[1]:,} test images"
    return f"CIFAR-10, {'PNG' if lossless else 'JPEG re-encoded'} (image tree{count})"


def _dataset(description: str, classes: int, train: Split, test: Split) -> InMemoryDataset:
    return InMemoryDataset(
        name="cifar10",
        description=description,
        classes=classes,
        train=train,
        test=test,
        statistics=(MEAN, STD),
        augmentation=CropAndFlip(padding=4, flip=True),
    )


def _read_images(files: Sequence[str], loader_workers: int) -> Tensor:
    """Return [n, 3, 32, 32] uint8; raise DatasetError naming the files that are damaged or of another size."""
    requests = [[Sample(file) for file in files[k : k + CHUNK]] for k in range(0, len(files), CHUNK)]
    processes = loader_workers if len(requests) > 1 else 0
    images, failures = torch.empty((len(files), 3, IMAGE_SIZE, IMAGE_SIZE), dtype=torch.uint8), []
    for k, (decoded, failed) in enumerate(decode(requests, _to_tensor, processes=processes)):
        failures += failed
        if not failures:
            images[k * CHUNK : (k + 1) * CHUNK] = decoded
    if failures:
        raise unreadable(failures)
    return images


def _to_tensor(image: Image.Image, _: object) -> Tensor:
    if image.size != (IMAGE_SIZE, IMAGE_SIZE):
        raise ValueError(f"{image.width}x{image.height} pixels, expected {IMAGE_SIZE}x{IMAGE_SIZE}")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def _contents(root: Path) -> str:
    if not root.is_dir():
        return f"{root} is a file, not a folder" if root.exists() else f"the folder {root} does not exist"
    names = sorted(entry.name for entry in root.iterdir())
    return f"{root} holds {several(names)}" if names else f"the folder {root} is empty"


def _help(root: Path) -> str:
    return (
        "Expected one of:\n"
        f"  {root}/{BATCHES}/data_batch_1 ... data_batch_5, test_batch, batches.meta   (cifar-10-python.tar.gz)\n"
        f"  {root}/train/<class>/* and {root}/test/<class>/*   (png, jpg or jpeg; or both one folder deeper)\n"
        "Name another folder by dataset.root=/path/to/data, or fetch 163 MiB by dataset.download=true"
    )
