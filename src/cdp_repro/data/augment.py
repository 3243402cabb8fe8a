"""From batches of uint8 images to network inputs: random crop and flip for each sample, then normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdp_repro.data.dataset import Form

# (mean, standard deviation) of each channel, for intensities from 0 to 1
Statistics = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class CropAndFlip:
    """Shift images by up to `padding` pixels each way (zeros move in); if `flip`, mirror each with probability 1/2."""

    padding: int
    flip: bool

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return [n, c, h, w] images, each with its own shift and flip, drawn from a generator on the CPU.

        The draws are on the CPU whatever the device of the images, so that every kind of device sees the same images.
        """
        count = len(images)
        tops, lefts = torch.randint(0, 2 * self.padding + 1, (2, count), generator=generator)
        flips = torch.randint(0, 2, (count,), generator=generator) if self.flip else torch.zeros_like(tops)
        # One copy, which does not wait for the work that the device still has to do.
        tops, lefts, flips = torch.stack([tops, lefts, flips]).to(images.device, non_blocking=True)
        return crop_and_flip(images, tops, lefts, flips.bool(), self.padding)


def crop_and_flip(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Pad by zeros, cut [h, w] at (tops[k], lefts[k]) out of image k, and mirror it left to right where flips[k].

    Shapes: images [n, c, h, w], the rest [n]; tops and lefts from 0 to 2 * padding, flips bool. The crop and flip
    of He et al. (2016), section 4.2, by index, since transforms v2 gives all images of a batch the same parameters.
    """
    count, channels, height, width = images.shape
    along_height = torch.arange(height, device=images.device)
    along_width = torch.arange(width, device=images.device)
    rows = tops[:, None] + along_height
    columns = lefts[:, None] + torch.where(flips[:, None], along_width.flip(0), along_width)
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded[
        torch.arange(count, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


class Normalise:
    """From uint8 images to inputs of zero mean and unit variance, in a form."""

    def __init__(self, statistics: Statistics, form: Form) -> None:
        self.device = form.device
        self._dtype = form.dtype
        # Half precision cannot hold all 256 grey levels exactly: compute in single precision and round once.
        self._compute_dtype = torch.promote_types(form.dtype, torch.float32)
        self._memory_format = torch.channels_last if form.channels_last else torch.contiguous_format
        mean, std = torch.tensor(statistics, dtype=torch.float64)
        self._scale = self._channels(1 / (255 * std))
        self._shift = self._channels(-mean / std)

    def _channels(self, values: Tensor) -> Tensor:
        return values.to(self.device, self._compute_dtype)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """Return [n, c, h, w] normalised images in storage of their own."""
        result = images.to(self.device, non_blocking=True)
        result = result.to(self._compute_dtype, memory_format=self._memory_format)
        return result.mul_(self._scale).add_(self._shift).to(self._dtype)
