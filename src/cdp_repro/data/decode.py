"""Decoding image files, in processes of a DataLoader or in this one, with the same result."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cdp_repro.data.dataset import DatasetError


class Sample(NamedTuple):
    """One image to decode, and the keys that seed its augmentation; without keys it is not augmented."""

    file: str
    keys: tuple[int | str, ...] = ()


# From an image to a tensor of a fixed shape; raises ValueError for an image that cannot be used.
Transform = Callable[[Image.Image, tuple[int | str, ...]], Tensor]


class Failure(NamedTuple):
    """A file that cannot be used, and why, in one line."""

    file: str
    reason: str


def decode(
    requests: Iterable[Sequence[Sample]], transform: Transform, *, processes: int, pin_memory: bool = False
) -> Iterator[tuple[Tensor, list[Failure]]]:
    """Return, in order, the transformed images of each request, [images, 3, height, width], and the files that failed.

    Requests are taken ahead of the results, two for each of the `processes`; 0 decodes in this process.
    """
    loader = DataLoader(
        _Decoder(transform),
        sampler=requests,
        batch_size=None,
        num_workers=processes,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise it would draw from the generator of the caller
        worker_init_fn=_leave_interrupts,
    )
    yield from loader


def _leave_interrupts(_worker: int) -> None:
    """Ignore Ctrl-C, which every process of a terminal gets: it is for the process that asks, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def unreadable(failures: Sequence[Failure]) -> DatasetError:
    """Return the error that names the first five failures, and their number."""
    lines = [f"  {file}: {reason}" for file, reason in failures[:5]]
    if len(failures) > 5:
        lines.append(f"  and {len(failures) - 5:,} more")
    noun = "image" if len(failures) == 1 else "images"
    remedy = "Unpack the data set again; or delete these files: a new run then trains without them."
    return DatasetError("\n".join([f"{len(failures):,} {noun} cannot be used:", *lines, remedy]))


def _rgb(image: Image.Image) -> Image.Image:
    """Return an image with red, green and blue; raise ValueError if it has more than 8 bits a channel.

    Pillow would cut its values off at 255: most of them would be white.
    """
    if image.mode[0] in "IF":
        raise ValueError(f"it has more than 8 bits a channel (Pillow's mode {image.mode}): convert it to 8 bits")
    return image.convert("RGB")


class _Decoder(TorchDataset[tuple[Tensor, list[Failure]]]):
    """Returns failures instead of raising: an exception would reach the user inside a process's traceback."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def __getitem__(self, request: Sequence[Sample]) -> tuple[Tensor, list[Failure]]:
        images, failures = [], []
        for file, keys in request:
            try:
                with Image.open(file) as image:
                    images.append(self._transform(_rgb(image), keys))
            except Exception as error:  # Pillow's decoders raise whatever the bytes lead them to
                reason = str(error).replace(f" {file!r}", "") or type(error).__name__
                failures.append(Failure(file, reason))
        return torch.stack(images) if images else torch.empty(0), failures
