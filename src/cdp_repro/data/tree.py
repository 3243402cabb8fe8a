"""Image trees with one folder per class: finds the files, and refuses incomplete trees."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cdp_repro.data.dataset import DatasetError
from cdp_repro.launch import is_rank_0
from cdp_repro.observe.text import several

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True, eq=False)
class ImageTree:
    """The images `files[k]` of class `classes[labels[k]]`, sorted by class and name."""

    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: Tensor


def scan_trees(root: Path, splits: tuple[str, str], help_text: str) -> tuple[ImageTree, ImageTree]:
    """Return the trees root/splits[0]/<class>/* and root/splits[1]/<class>/*, which must have the same classes.

    Raises:
        DatasetError: lists everything that is missing, with `help_text`.
    """
    problems: list[str] = []
    first, second = (_scan(root / split, problems) for split in splits)
    if first and second and first.classes != second.classes:
        for split, own, other in ((splits[0], first, second), (splits[1], second, first)):
            only = sorted(set(own.classes) - set(other.classes))
            if only:
                problems.append(f"only {root / split} has the class {several(only)}")
    if problems or not first or not second:
        found = "\n".join(f"  {problem}" for problem in problems)
        raise DatasetError(f"the images in {root} are incomplete:\n{found}\n{help_text}")
    return first, second


def _scan(folder: Path, problems: list[str]) -> ImageTree | None:
    """Return the tree in `folder`; None if there is none. Appends its problems to `problems`."""
    if not folder.is_dir():
        problems.append(f"{folder} is missing")
        return None
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        problems.append(f"{folder} has no class folders, but {sum(1 for _ in folder.iterdir()):,} other entries")
        return None
    found = [_entries(folder / name) for name in classes]
    names = [sorted(images) for images, _ in found]
    others = [
        f"{name}{os.sep}{other}" for name, (_, rest) in zip(classes, found, strict=True) for other in sorted(rest)
    ]
    if others and is_rank_0():
        used = ", ".join(IMAGE_SUFFIXES)
        logger.warning("warning: in %s only %s files are used, not %s", folder, used, several(others, limit=3))
    empty = [name for name, images in zip(classes, names, strict=True) if not images]
    if empty:
        problems.append(f"{folder} has {len(empty)} class folders without images ({several(empty)})")
    return ImageTree(
        classes=tuple(classes),
        files=tuple(
            f"{folder}{os.sep}{c}{os.sep}{image}" for c, images in zip(classes, names, strict=True) for image in images
        ),
        labels=torch.repeat_interleave(torch.tensor([len(images) for images in names])),
    )


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the images in a folder, and of what else is in it; hidden entries count as neither."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries if entry.name[0] != "."]
    images: list[str] = []
    others: list[str] = []
    for name, is_folder in found:
        (images if name.lower().endswith(IMAGE_SUFFIXES) and not is_folder else others).append(name)
    return images, others
