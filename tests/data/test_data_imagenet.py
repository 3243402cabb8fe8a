"""Trees of large images, decoded by processes: same result from any number of them, and clear errors out of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cdp_repro.data import Dataset, DatasetError, load_dataset
from cdp_repro.data.order import epoch_order
from cdp_repro.engine.randomness import seeded

CPU = torch.device("cpu")
SIZE = 16


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with five training and three validation images of several sizes."""
    root = tmp_path_factory.mktemp("imagenet")
    random = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 3)):
        for name in ("n01", "n02"):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                shape = (int(random.integers(20, 60)), int(random.integers(20, 60)), 3)
                image = Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
                image.save(root / split / name / f"{k}.JPEG", quality=95)
    return root


def load(root: Path, loader_workers: int = 0) -> Dataset:
    return load_dataset("imagenet", root=str(root), image_size=SIZE, loader_workers=loader_workers)


def inputs(data: Dataset, steps: range, parts: int = 2, seed: int = 0) -> list[list[torch.Tensor]]:
    batches = data.train_batches(steps, batch_size=4, parts=parts, seed=seed, device=CPU, dtype=torch.float64)
    return [[batch.inputs(part) for part in range(parts)] for batch in batches]


def reference(image: Image.Image) -> torch.Tensor:
    """Normalise as torchvision does."""
    pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(image), torch.float64, scale=True)
    return v2.functional.normalize(pixels, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def test_sizes(tree: Path) -> None:
    data = load(tree)
    assert (data.classes, data.input_shape, data.train_size, data.test_size) == (2, (3, SIZE, SIZE), 10, 6)
    assert data.description == "image tree, 2 classes, 10 training and 6 test images"
    assert load_dataset("imagenet", root=str(tree)).input_shape == (3, 224, 224)


def test_training_images_equal_torchvision_seeded_per_sample(tree: Path) -> None:
    files = sorted((tree / "train").glob("*/*"))
    transform = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])
    for step, batch in enumerate(inputs(load(tree), range(5), seed=3)):
        epoch, place = divmod(step, 2)
        order = epoch_order(10, 3, epoch)[place * 4 : place * 4 + 4].view(2, 2).tolist()
        for part, position in itertools.product(range(2), range(2)):
            with seeded(CPU, 3, "augment", step, part, position), Image.open(files[order[part][position]]) as image:
                expected = reference(transform(image.convert("RGB")))
            torch.testing.assert_close(batch[part][position], expected)


@pytest.mark.parametrize(("size", "resized"), [(SIZE, 18), (224, 256)])
def test_test_images_equal_torchvision(tree: Path, size: int, resized: int) -> None:
    transform = v2.Compose([v2.Resize(resized, antialias=True), v2.CenterCrop(size)])
    expected = [reference(transform(Image.open(file).convert("RGB"))) for file in sorted((tree / "val").glob("*/*"))]
    data = load_dataset("imagenet", root=str(tree), image_size=size, loader_workers=0)
    parts = list(data.test_batches(4, device=CPU, dtype=torch.float64))
    assert [len(labels) for _, labels in parts] == [4, 2]
    torch.testing.assert_close(torch.cat([images for images, _ in parts]), torch.stack(expected))
    assert torch.cat([labels for _, labels in parts]).tolist() == [0, 0, 0, 1, 1, 1]


def test_processes_change_nothing(tree: Path) -> None:
    here, there = inputs(load(tree), range(5)), inputs(load(tree, loader_workers=2), range(5))
    assert all(a.equal(b) for one, two in zip(here, there, strict=True) for a, b in zip(one, two, strict=True))
    here_test, there_test = (list(load(tree, n).test_batches(4, device=CPU)) for n in (0, 2))
    assert all(
        a.equal(b) for one, two in zip(here_test, there_test, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_a_resume_gives_the_same_images_and_labels(tree: Path) -> None:
    data = load(tree)
    whole = list(data.train_batches(range(5), batch_size=4, parts=2, seed=0, device=CPU))
    rest = list(data.train_batches(range(3, 5), batch_size=4, parts=2, seed=0, device=CPU))
    for a, b in zip(whole[3:], rest, strict=True):
        assert a.step == b.step
        assert a.inputs(1).equal(b.inputs(1)) and a.targets(1).equal(b.targets(1))


def test_targets_belong_to_the_images(tree: Path) -> None:
    labels = torch.tensor([0] * 5 + [1] * 5)
    batches = load(tree).train_batches(range(2), batch_size=4, parts=2, seed=0, device=CPU)
    targets = torch.cat([batch.targets(part) for batch in batches for part in range(2)])
    assert targets.equal(labels[epoch_order(10, 0, 0)[:8]])


def test_micro_batches_can_be_read_twice_and_share_nothing(tree: Path) -> None:
    (batch,) = load(tree).train_batches([0], batch_size=4, parts=2, seed=0, device=CPU)
    first, targets = batch.inputs(1).clone(), batch.targets(1).clone()
    batch.inputs(1).zero_()
    batch.targets(1).zero_()
    assert batch.inputs(1).equal(first) and batch.targets(1).equal(targets)
    assert batch.inputs(1).untyped_storage().nbytes() == first.numel() * 4
    assert batch.targets(1).untyped_storage().nbytes() == 2 * 8


def test_only_images_that_are_read_are_decoded(tree: Path, monkeypatch) -> None:
    opened, honest = [], Image.open
    monkeypatch.setattr(Image, "open", lambda file: opened.append(file) or honest(file))
    everything = inputs(load(tree), range(2))
    assert len(opened) == 2 * 4
    opened.clear()
    own = load(tree).train_batches(
        range(2),
        batch_size=4,
        parts=2,
        seed=0,
        device=CPU,
        dtype=torch.float64,
        is_read=lambda _, part: part == 1,
    )
    batches = list(own)
    assert len(opened) == 2 * 2
    assert all(batch.inputs(1).equal(whole[1]) for batch, whole in zip(batches, everything, strict=True))
    assert len(opened) == 2 * 2
    assert batches[0].inputs(0).equal(everything[0][0])  # not announced, so decoded when asked for
    assert len(opened) == 2 * 2 + 2


def test_a_rank_that_reads_nothing_decodes_nothing(tree: Path, monkeypatch) -> None:
    monkeypatch.setattr(Image, "open", lambda file: pytest.fail(f"opened {file}"))
    batches = load(tree).train_batches(range(2), batch_size=4, parts=2, seed=0, device=CPU, is_read=lambda *_: False)
    assert [batch.targets(1).shape for batch in batches] == [(2,), (2,)]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_global_random_state_does_not_change(tree: Path, loader_workers: int) -> None:
    state = torch.get_rng_state()
    inputs(load(tree, loader_workers), range(2))
    assert torch.get_rng_state().equal(state)


def test_endless_steps_are_taken_lazily(tree: Path) -> None:
    batches = load(tree, loader_workers=1).train_batches(itertools.count(), batch_size=4, parts=2, seed=0, device=CPU)
    assert [batch.step for batch in itertools.islice(batches, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_damaged_image_is_named_without_a_traceback(tmp_path: Path, loader_workers: int) -> None:
    for split in ("train", "val"):
        for k in range(4):
            (tmp_path / split / "n01").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20)).save(tmp_path / split / "n01" / f"{k}.jpg")
    damaged = tmp_path / "train" / "n01" / "2.jpg"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DatasetError) as caught:
        inputs(load(tmp_path, loader_workers), range(1))
    text = str(caught.value)
    assert text.startswith(f"1 image cannot be used:\n  {damaged}: ")
    assert "Traceback" not in text
    damaged.rename(tmp_path / "val" / "n01" / "2.jpg")
    with pytest.raises(DatasetError, match="1 image cannot be used"):
        list(load(tmp_path, loader_workers).test_batches(2, device=CPU))


def test_flat_validation_folder_and_missing_tree(tmp_path: Path, tree: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"train is missing(.|\n)*val is missing(.|\n)*dataset.root=/path/to/imagenet"
    ):
        load(tmp_path / "none")
    (tmp_path / "train").symlink_to(tree / "train")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    with pytest.raises(DatasetError, match="val has no class folders, but 1 other entries"):
        load(tmp_path)


def test_bad_settings(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset.image_size=-1 must be at least 1"):
        load_dataset("imagenet", root=str(tree), image_size=-1)
    with pytest.raises(ValueError, match="batch_size=5 is not divisible by parts=2"):
        load(tree).train_batches(range(1), batch_size=5, parts=2, seed=0, device=CPU)


def test_fingerprint_sees_names_but_not_the_place_nor_whether_an_image_was_damaged(tmp_path: Path) -> None:
    def write(root: Path, name: str = "1.png") -> str:
        for split in ("train", "val"):
            (root / split / "a").mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(root / split / "a" / name)
        return load(root).fingerprint()

    one = write(tmp_path / "one")
    assert write(tmp_path / "same") == one
    assert write(tmp_path / "name", name="2.png") != one
    (tmp_path / "one" / "val" / "a" / "1.png").write_bytes(b"cut off")
    assert load(tmp_path / "one").fingerprint() == one
