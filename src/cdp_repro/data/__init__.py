"""Data sets whose order and augmentation depend on (seed, step, micro-batch) and never on where they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cdp_repro.data.dataset import Dataset, DatasetError, MiniBatch
from cdp_repro.data.order import steps_per_epoch
from cdp_repro.schedule.by_name import ByName, nearest, refusing

__all__ = ["DATASETS", "Dataset", "DatasetError", "MiniBatch", "load_dataset", "steps_per_epoch"]

_ENTERED: ByName[Callable[[str | None], Dataset]] = ByName(
    "datasets", {}, callable, "a function from dataset.root to a cdp_repro.data.Dataset"
)
"""Data sets that installed packages have entered: functions from `root` to the data set."""

DATASETS = ("digits", "cifar10", "imagenet", "synthetic", "text")


@contextmanager
def _readable() -> Iterator[None]:
    """Raise DatasetError for what may not be read; even to look whether a file is there needs leave."""
    try:
        yield
    except PermissionError as error:
        raise DatasetError(f"{error.filename}: {error.strerror}: give a dataset.root= that you may read") from error


@_readable()
def load_dataset(
    name: str,
    *,
    root: str | None = None,
    image_size: int | None = None,
    download: bool = False,
    classes: int = 10,
    train_samples: int = 1024,
    test_samples: int = 256,
    seed: int = 0,
    loader_workers: int = 2,
    context: int = 128,
    tokens: str = "bytes",
) -> Dataset:
    """Load one of `DATASETS`, or one that an installed package has entered.

    Args:
        name: its name.
        root: folder of `cifar10` (default `data`) or of `imagenet` (default `data/imagenet`); file or folder of `text`
            (default: sources of Python's library).
        image_size: height and width in pixels of `imagenet` (default 224) and `synthetic` (default 32).
        download: fetch `cifar10` into `root` where it is not there yet.
        classes: number of classes of `synthetic`.
        train_samples: number of training images of `synthetic`.
        test_samples: number of test images of `synthetic`.
        seed: seed of the images of `synthetic`; the other data sets are the same for every seed.
        loader_workers: processes that decode image files; 0 decodes in the calling process.
        context: tokens of a sequence of `text`.
        tokens: `bytes` or `characters`, of `text`.

    Raises:
        ValueError: unknown name, or a size that makes no sense.
        DatasetError: the files are missing, incomplete or damaged.
    """
    # Imported here: scikit-learn and torchvision take seconds, and a run needs at most one of them.
    if name == "digits":
        from cdp_repro.data.digits import load_digits

        return load_digits()
    if name == "cifar10":
        from cdp_repro.data.cifar10 import load_cifar10

        return load_cifar10(Path(root or "data"), download=download, loader_workers=loader_workers)
    if name == "imagenet":
        from cdp_repro.data.imagenet import load_imagenet

        return load_imagenet(Path(root or "data/imagenet"), image_size=image_size or 224, loader_workers=loader_workers)
    if name == "synthetic":
        from cdp_repro.data.synthetic import load_synthetic

        return load_synthetic(
            classes=classes,
            train_samples=train_samples,
            test_samples=test_samples,
            image_size=image_size or 32,
            seed=seed,
        )
    if name == "text":
        from cdp_repro.data.text_dataset import load_text

        return load_text(Path(root) if root else None, context=context, tokens=tokens)
    if name in _ENTERED:
        return _load_entered(name, root)
    raise ValueError(f"unknown dataset {name!r}{nearest(name, DATASETS)}: choose {', '.join(DATASETS)}")


def _load_entered(name: str, root: str | None) -> Dataset:
    with refusing(f"dataset={name} cannot be loaded", DatasetError):
        found: object = _ENTERED[name](root)
    if not isinstance(found, Dataset):
        raise DatasetError(f"dataset={name} is of the type {type(found).__name__}: its function must return a Dataset")
    with refusing(f"dataset={name} cannot be used", DatasetError):
        empty = [split for split, size in (("training", found.train_size), ("test", found.test_size)) if size < 1]
    if empty:
        raise DatasetError(f"dataset={name} has no {' and no '.join(empty)} samples: a run needs at least 1 of each")
    return found
