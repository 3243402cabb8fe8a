"""Crop, flip and normalisation against plain loops over samples and pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdp_repro.data.augment import CropAndFlip, Normalise, crop_and_flip
from cdp_repro.data.dataset import Form

CPU = torch.device("cpu")


def naive(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Pad, cut and mirror one image after the other, in numpy."""
    results = []
    for image, top, left, flip in zip(images.numpy(), tops.tolist(), lefts.tolist(), flips.tolist(), strict=True):
        _, height, width = image.shape
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        cut = padded[:, top : top + height, left : left + width]
        results.append(cut[:, :, ::-1].copy() if flip else cut.copy())
    return torch.from_numpy(np.stack(results))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    padding=st.integers(0, 4),
    seed=st.integers(0, 999),
)
def test_crop_and_flip_equals_a_loop_over_samples(shape: tuple[int, ...], padding: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, shape[0]), generator=draw)
    flips = torch.randint(0, 2, (shape[0],), generator=draw).bool()
    result = crop_and_flip(images, tops, lefts, flips, padding)
    assert result.dtype == torch.uint8
    assert result.equal(naive(images, tops, lefts, flips, padding))


def test_every_sample_gets_parameters_of_its_own_and_all_of_them_occur() -> None:
    # One image whose pixels are all different, so that the parameters can be read off the result.
    image = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5)
    results = CropAndFlip(padding=1, flip=True)(image.expand(600, 1, 5, 5), torch.Generator().manual_seed(0))
    assert len({tuple(result.flatten().tolist()) for result in results}) == 3 * 3 * 2


def test_no_flip_where_none_is_asked_for() -> None:
    image = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5)
    results = CropAndFlip(padding=1, flip=False)(image.expand(600, 1, 5, 5), torch.Generator().manual_seed(0))
    assert len({tuple(result.flatten().tolist()) for result in results}) == 3 * 3


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_normalise(dtype: torch.dtype, tolerance: float, channels_last: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    result = Normalise((mean, std), Form(CPU, dtype, channels_last))(images)
    expected = torch.stack(
        [(images[:, c].double() / 255 - mean[c]) / std[c] for c in range(3)], dim=1
    )  # in the order of the textbook
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert result.is_contiguous() != channels_last
