"""Data sets in memory: what a mini-batch hands out, on which device, and how much of it depends on what."""

from __future__ import annotations

import itertools

import pytest
import torch

from cdp_repro.data import DATASETS, Dataset, MiniBatch, load_dataset, steps_per_epoch
from cdp_repro.data.augment import CropAndFlip
from cdp_repro.data.in_memory import InMemoryDataset, Split
from cdp_repro.data.order import epoch_order
from cdp_repro.engine.randomness import generator

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def tiny(count: int = 24) -> InMemoryDataset:
    """Random 3x6x6 images with crop and flip; the label is the position in the set."""
    draw = torch.Generator().manual_seed(7)
    train = Split(torch.randint(0, 256, (count, 3, 6, 6), generator=draw, dtype=torch.uint8), torch.arange(count))
    test = Split(train.images[:7].clone(), train.labels[:7].clone())
    return InMemoryDataset(
        name="tiny",
        description="tiny",
        classes=count,
        train=train,
        test=test,
        statistics=((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),  # inputs are the grey levels
        augmentation=CropAndFlip(padding=2, flip=True),
    )


GREY, NUMBERS = torch.zeros(4, 1, 6, 6, dtype=torch.uint8), torch.arange(4)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            torch.rand(4, 1, 6, 6),
            NUMBERS,
            r"images are torch.float32 \[4, 1, 6, 6\]: give torch.uint8 \[n, c, h, w\], ",
        ),
        (GREY[:, 0], NUMBERS, r"images are torch.uint8 \[4, 6, 6\]: give torch.uint8 \[n, c, h, w\]"),
        (GREY, NUMBERS.int(), r"class numbers are torch.int32 \[4\]: give torch.int64 \[n\], by labels.long\(\)"),
        (GREY, NUMBERS[:, None], r"class numbers are torch.int64 \[4, 1\]: give"),
        (GREY, NUMBERS[:3], "4 images have 3 class numbers: give one for each image"),
    ],
)
def test_images_and_class_numbers_of_another_kind_are_refused(images, labels, message) -> None:
    with pytest.raises(ValueError, match=message):
        Split(images, labels)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            Split(GREY[:, :, 1:, 1:], NUMBERS),
            r"training images are \[1, 6, 6\], test images \[1, 5, 5\]: give both one",
        ),
        (Split(GREY, NUMBERS + 1), "class numbers are from 0 to 4, with classes=4: give numbers from 0 to 3"),
        (Split(GREY, NUMBERS - 1), "class numbers are from -1 to 3, with classes=4: give numbers from 0 to 3"),
    ],
)
def test_splits_that_do_not_belong_together_are_refused(test: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InMemoryDataset(
            name="mine", description="mine", classes=4, train=Split(GREY, NUMBERS), test=test,
            statistics=((0.5,), (0.5,)), augmentation=None,
        )  # fmt: skip


def batches(data: Dataset, steps: range, *, parts: int = 4, seed: int = 0, **settings: object) -> list[MiniBatch]:
    defaults: dict[str, object] = {"device": CPU, "dtype": torch.float64, "batch_size": 8}
    return list(data.train_batches(steps, parts=parts, seed=seed, **{**defaults, **settings}))  # type: ignore[arg-type]


def test_inputs_are_the_augmented_slice_of_the_mini_batch() -> None:
    data = tiny()
    for batch in batches(data, range(7), seed=5):
        epoch, position = divmod(batch.step, 3)
        mini_batch = epoch_order(24, 5, epoch)[position * 8 : (position + 1) * 8]
        for part in range(4):
            mine = mini_batch[part * 2 : (part + 1) * 2]
            draw = generator("cpu", 5, "augment", batch.step, part)
            expected = data._augmentation(data._train.images[mine], draw)  # type: ignore[misc]
            torch.testing.assert_close(batch.inputs(part), expected.double())
            assert batch.targets(part).equal(mine)


def test_micro_batches_come_in_any_order_any_number_of_times() -> None:
    data = tiny()
    forward = [[b.inputs(w) for w in range(4)] for b in batches(data, range(6))]
    late = batches(data, range(6))
    for batch, part in reversed(list(itertools.product(late, range(4)))):
        batch.inputs(part).zero_()  # would spoil the second reading if storage were shared
        batch.targets(part).zero_()
        assert batch.inputs(part).equal(forward[batch.step][part])
    assert all(
        b.targets(w).equal(c.targets(w)) for b, c in zip(batches(data, range(6)), late, strict=True) for w in range(4)
    )


def test_a_resume_in_the_middle_of_an_epoch_gives_the_same_inputs() -> None:
    data = tiny()
    whole, rest = batches(data, range(9)), batches(data, range(4, 9))
    for a, b in zip(whole[4:], rest, strict=True):
        assert (a.step, a.inputs(2).tolist()) == (b.step, b.inputs(2).tolist())


def test_global_random_state_neither_matters_nor_changes() -> None:
    data = tiny()
    reference = [b.inputs(1) for b in batches(data, range(3))]
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert all(a.equal(b.inputs(1)) for a, b in zip(reference, batches(data, range(3)), strict=True))
    assert torch.get_rng_state().equal(state)


def test_seed_step_and_worker_all_change_the_augmentation() -> None:
    # All images are the same, so that only the augmentation differs.
    image = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    split = Split(image.repeat(64, 1, 1, 1), torch.zeros(64, dtype=torch.int64))
    data = InMemoryDataset(
        name="same",
        description="same",
        classes=1,
        train=split,
        test=split,
        statistics=((0.5,), (0.5,)),
        augmentation=CropAndFlip(padding=2, flip=True),
    )
    seen = {
        tuple(batch.inputs(part).flatten().tolist())
        for seed in range(3)
        for batch in batches(data, range(3), seed=seed, batch_size=32, parts=2)
        for part in range(2)
    }
    assert len(seen) == 3 * 3 * 2


def test_the_number_of_threads_does_not_matter() -> None:
    data = tiny()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(torch.stack([b.inputs(0) for b in batches(data, range(3))]))
    finally:
        torch.set_num_threads(before)
    assert results[0].equal(results[1])


def test_own_storage_dtype_and_memory_format() -> None:
    data = tiny()
    for dtype, channels_last in itertools.product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
        (batch,) = batches(data, range(1), dtype=dtype, channels_last=channels_last, batch_size=16, parts=2)
        inputs = batch.inputs(1)
        assert (inputs.dtype, inputs.shape) == (dtype, (8, 3, 6, 6))
        assert inputs.untyped_storage().nbytes() == inputs.numel() * inputs.element_size()
        assert batch.targets(1).untyped_storage().nbytes() == 8 * 8
        assert inputs.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("device", DEVICES)
def test_devices_see_the_same_images(device: str) -> None:
    data = tiny()
    here = batches(data, range(4))
    there = batches(data, range(4), device=torch.device(device))
    for a, b in zip(here, there, strict=True):
        assert b.inputs(3).device.type == device
        assert b.inputs(3).cpu().equal(a.inputs(3))
        assert b.targets(3).cpu().equal(a.targets(3))


def test_the_set_moves_to_a_device_once() -> None:
    data = tiny()
    meta = torch.device("meta")
    data.train_batches(range(1), batch_size=8, parts=4, seed=0, device=meta)
    first = data._on_device[meta]
    data.train_batches(range(1), batch_size=8, parts=4, seed=0, device=meta)
    assert data._on_device[meta] is first


def test_test_batches_are_the_whole_test_set_in_order() -> None:
    data = tiny()
    parts = list(data.test_batches(3, device=CPU, dtype=torch.float64))
    assert [len(labels) for _, labels in parts] == [3, 3, 1]
    torch.testing.assert_close(torch.cat([images for images, _ in parts]), data._test.images.double())
    assert torch.cat([labels for _, labels in parts]).equal(data._test.labels)
    parts[0][1].zero_()
    assert data._test.labels.tolist() == list(range(7))


def test_bad_sizes_are_refused_when_asked_not_when_read() -> None:
    with pytest.raises(ValueError, match="batch_size=10 is not divisible by parts=4"):
        tiny().train_batches(range(1), batch_size=10, parts=4, seed=0, device=CPU)


def test_fingerprint_sees_every_part() -> None:
    prints = {tiny().fingerprint(), tiny().fingerprint()}
    assert len(prints) == 1 and len(prints.pop()) == 16
    for part in ("_train", "_test"):
        for field in ("images", "labels"):
            changed = tiny()
            getattr(getattr(changed, part), field)[-1] += 1
            assert changed.fingerprint() != tiny().fingerprint()


def test_digits(digits: Dataset) -> None:
    assert (digits.name, digits.classes, digits.input_shape) == ("digits", 10, (1, 8, 8))
    assert digits.train_size + digits.test_size == 1797
    assert digits.test_size == 355
    ((images, labels),) = digits.test_batches(1000, device=CPU)
    counts = torch.bincount(labels)
    assert (counts.min() >= 34) and (counts.max() <= 36)
    assert digits.fingerprint() == load_dataset("digits", seed=1).fingerprint()
    train = torch.cat(
        [b.inputs(0) for b in digits.train_batches(range(5), batch_size=288, parts=1, seed=0, device=CPU)]
    )
    for sample, tolerance in ((images, 0.05), (train, 0.1)):  # a shift moves ink out of the training images
        assert abs(sample.mean()) < tolerance
        assert abs(sample.std() - 1) < tolerance


def test_digits_keep_every_grey_level(digits: Dataset) -> None:
    assert isinstance(digits, InMemoryDataset)
    expected = [round(level * 255 / 16) for level in range(17)]
    assert digits._train.images.unique().tolist() == expected


def test_digits_share_no_image_between_the_splits(digits: Dataset) -> None:
    assert isinstance(digits, InMemoryDataset)
    train = {tuple(image.flatten().tolist()) for image in digits._train.images}
    assert not any(tuple(image.flatten().tolist()) in train for image in digits._test.images)


def test_synthetic_sizes_and_seeds() -> None:
    data = load_dataset("synthetic", classes=3, train_samples=30, test_samples=10, image_size=20, seed=4)
    assert (data.classes, data.input_shape, data.train_size, data.test_size) == (3, (3, 20, 20), 30, 10)
    same = load_dataset("synthetic", classes=3, train_samples=30, test_samples=10, image_size=20, seed=4)
    other = load_dataset("synthetic", classes=3, train_samples=30, test_samples=10, image_size=20, seed=5)
    assert data.fingerprint() == same.fingerprint() != other.fingerprint()
    assert load_dataset("synthetic").input_shape == (3, 32, 32)


def test_synthetic_bytes_do_not_change_between_releases() -> None:
    assert load_dataset("synthetic", train_samples=8, test_samples=8, image_size=8).fingerprint() == "8749dbcc52049c85"


def test_synthetic_is_learnable_but_not_constant() -> None:
    data = load_dataset("synthetic", train_samples=200, test_samples=100)
    images = torch.cat([b.inputs(0) for b in data.train_batches([0], batch_size=200, parts=1, seed=0, device=CPU)])
    labels = torch.cat([b.targets(0) for b in data.train_batches([0], batch_size=200, parts=1, seed=0, device=CPU)])
    means = torch.stack([images[labels == k].mean(0) for k in range(10)])
    ((test, expected),) = data.test_batches(100, device=CPU)
    assert torch.cdist(test.flatten(1), means.flatten(1)).argmin(1).equal(expected)
    assert abs(images.mean()) < 0.2 and abs(images.std() - 1) < 0.2
    assert not test[expected == 0][0].equal(test[expected == 0][1])


@pytest.mark.parametrize("key", ["classes", "train_samples", "test_samples", "image_size"])
def test_synthetic_refuses_sizes_below_one(key: str) -> None:
    with pytest.raises(ValueError, match=f"dataset.{key}=-1 must be at least 1"):
        load_dataset("synthetic", **{key: -1})  # type: ignore[arg-type]


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown dataset 'cifar'; did you mean 'cifar10'"):
        load_dataset("cifar")
    assert DATASETS == ("digits", "cifar10", "imagenet", "synthetic", "text")


def test_steps_per_epoch_is_exported(digits: Dataset) -> None:
    assert steps_per_epoch(digits.train_size, 64) == 22
