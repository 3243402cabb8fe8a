"""CIFAR-10 from tiny stand-ins of the official batches and of an image tree, and everything that can be wrong there."""

from __future__ import annotations

import hashlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from cdp_repro.data import DatasetError, load_dataset
from cdp_repro.data import cifar10 as module
from cdp_repro.data.in_memory import InMemoryDataset

CLASSES = ("ant", "bee", "cat")


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def write_tree(root: Path, suffix: str = "png", train: int = 4, test: int = 2) -> Path:
    """Write root/{train,test}/<class>/000k.<suffix>; image k of class c in a split has a seed of its own."""
    for split, count in (("train", train), ("test", test)):
        for c, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                Image.fromarray(pixels(1000 * (split == "test") + 100 * c + k)).save(folder / f"{k:04d}.{suffix}")
    return root


def load(root: Path, **settings: object) -> InMemoryDataset:
    data = load_dataset("cifar10", root=str(root), **settings)  # type: ignore[arg-type]
    assert isinstance(data, InMemoryDataset)
    return data


def message(root: Path, **settings: object) -> str:
    """The error of loading `root`, which has to fit on a screen."""
    with pytest.raises(DatasetError) as caught:
        load(root, **settings)
    text = str(caught.value)
    assert text.count("\n") < 20
    return text


# --- image tree -------------------------------------------------------------------------------------------------------


def test_png_tree_is_read_exactly(tmp_path: Path) -> None:
    data = load(write_tree(tmp_path))
    assert (data.classes, data.input_shape, data.train_size, data.test_size) == (3, (3, 32, 32), 12, 6)
    assert data.description == "CIFAR-10, PNG (image tree, 12 training and 6 test images)"
    assert data._train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data._test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data._train.images[5].permute(1, 2, 0).numpy().tolist() == pixels(101).tolist()
    assert data._test.images[5].permute(1, 2, 0).numpy().tolist() == pixels(1201).tolist()


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "JPG"])
def test_jpeg_tree_says_so_and_is_what_pillow_decodes(tmp_path: Path, suffix: str) -> None:
    data = load(write_tree(tmp_path, suffix))
    assert data.description.startswith("CIFAR-10, JPEG re-encoded (image tree")
    decoded = np.asarray(Image.open(tmp_path / "test" / "bee" / f"0001.{suffix}"))
    assert data._test.images[3].permute(1, 2, 0).numpy().tolist() == decoded.tolist()


def test_full_size_needs_no_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_SIZE", (12, 6))
    assert load(write_tree(tmp_path, "jpg")).description == "CIFAR-10, JPEG re-encoded (image tree)"


def test_tree_one_level_below(tmp_path: Path) -> None:
    write_tree(tmp_path / "cifar10-images")
    (tmp_path / "imagenet" / "train").mkdir(parents=True)  # another data set beside it does no harm
    assert load(tmp_path).fingerprint() == load(tmp_path / "cifar10-images").fingerprint()


def test_chunks_and_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(write_tree(tmp_path)).fingerprint()
    monkeypatch.setattr(module, "CHUNK", 5)
    assert load(tmp_path, loader_workers=0).fingerprint() == expected
    assert load(tmp_path, loader_workers=2).fingerprint() == expected


def test_images_of_16_bits_are_refused_as_pillow_would_make_them_white(tmp_path: Path) -> None:
    write_tree(tmp_path)
    Image.fromarray(pixels(0)[:, :, 0].astype("uint16") * 257).save(tmp_path / "train" / "ant" / "0000.png")
    with pytest.raises(DatasetError, match=r"0000\.png: it has more than 8 bits a channel .* convert it to 8 bits"):
        load(tmp_path)


def test_grey_images_become_rgb_and_other_files_are_told_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tree(tmp_path)
    Image.fromarray(pixels(0)[:, :, 0]).save(tmp_path / "train" / "ant" / "0000.png")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("x")
    (tmp_path / "train" / "ant" / "folder.png").mkdir()
    (tmp_path / "train" / "ant" / "._0000.png").write_text("left by macOS")
    (tmp_path / "train" / ".cache").mkdir()
    data = load(tmp_path)
    assert data.train_size == 12
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith("train only .png, .jpg, .jpeg files are used, not ant/folder.png, ant/notes.txt")
    assert data._train.images[0].tolist() == [pixels(0)[:, :, 0].tolist()] * 3


def test_augmentation_is_padding_four_and_flip(tmp_path: Path) -> None:
    data = load(write_tree(tmp_path))
    assert data._augmentation is not None
    assert (data._augmentation.padding, data._augmentation.flip) == (4, True)
    assert data._statistics == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


@pytest.mark.parametrize("split", ["train", "test"])
def test_missing_split(tmp_path: Path, split: str) -> None:
    write_tree(tmp_path)
    (tmp_path / split).rename(tmp_path / "elsewhere")
    text = message(tmp_path)
    assert f"{tmp_path / split} is missing" in text
    assert "dataset.root=/path/to/data" in text


def test_split_without_class_folders(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "test").rename(tmp_path / "elsewhere")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "0000.png").touch()
    assert f"{tmp_path / 'test'} has no class folders, but 1 other entries" in message(tmp_path)


def test_everything_that_is_wrong_with_the_classes_is_reported_at_once(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "test" / "ant").rename(tmp_path / "test" / "zebra")
    for file in (tmp_path / "train" / "bee").iterdir():
        file.unlink()
    text = message(tmp_path)
    assert f"{tmp_path / 'train'} has 1 class folders without images (bee)" in text
    assert f"only {tmp_path / 'train'} has the class ant" in text
    assert f"only {tmp_path / 'test'} has the class zebra" in text


@pytest.mark.parametrize("chunk", [1000, 2])
def test_all_damaged_images_are_counted_and_five_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    write_tree(tmp_path, "jpg")
    ant, bee = tmp_path / "train" / "ant", tmp_path / "train" / "bee"
    (ant / "0000.jpg").write_bytes((ant / "0000.jpg").read_bytes()[:300])  # cut off
    (ant / "0001.jpg").write_bytes(b"")
    (ant / "0002.jpg").write_text("<html>404</html>")
    Image.fromarray(pixels(0)[:28]).save(ant / "0003.jpg")
    for k in range(3):
        (bee / f"000{k}.jpg").write_bytes(b"")
    text = message(tmp_path)
    assert text.startswith("7 images cannot be used:")
    assert f"{ant / '0000.jpg'}: Truncated" in text
    assert f"{ant / '0002.jpg'}: cannot identify image file\n" in text
    assert f"{ant / '0003.jpg'}: 32x28 pixels, expected 32x32" in text
    assert str(bee / "0000.jpg") in text and str(bee / "0001.jpg") not in text
    assert "and 2 more" in text


def test_damaged_png(tmp_path: Path) -> None:
    file = write_tree(tmp_path) / "test" / "cat" / "0001.png"
    file.write_bytes(file.read_bytes()[:200] + bytes(200) + file.read_bytes()[400:])
    text = message(tmp_path)
    assert text.startswith("1 image cannot be used:") and str(file) in text


def test_two_trees_are_a_question(tmp_path: Path) -> None:
    write_tree(tmp_path / "a")
    write_tree(tmp_path / "b")
    text = message(tmp_path)
    assert f"dataset.root={tmp_path / 'a'}" in text and f"dataset.root={tmp_path / 'b'}" in text


# --- nothing there ----------------------------------------------------------------------------------------------------


def test_nothing_there_shows_the_layouts_and_the_remedy(tmp_path: Path) -> None:
    assert f"the folder {tmp_path / 'none'} does not exist" in message(tmp_path / "none")
    assert f"the folder {tmp_path} is empty" in message(tmp_path)
    (tmp_path / "readme").touch()
    assert f"{tmp_path / 'readme'} is a file, not a folder" in message(tmp_path / "readme")
    text = message(tmp_path)
    for part in (
        "holds readme",
        "data_batch_1",
        "train/<class>/*",
        "dataset.root=/path/to/data",
        "dataset.download=true",
    ):
        assert part in text


def test_default_root_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "data")
    assert load_dataset("cifar10").train_size == 12


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(self: CIFAR10) -> None:
        raise OSError("<urlopen error no network>")

    monkeypatch.setattr(CIFAR10, "download", offline)
    text = message(tmp_path, download=True)
    assert f"the download of CIFAR-10 into {tmp_path} failed: <urlopen error no network>" in text
    assert "train/<class>/*" in text


def test_of_two_that_download_at_once_the_second_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0

    def slow(self: CIFAR10) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.2)
        at_once -= 1
        raise OSError("no network")

    monkeypatch.setattr(CIFAR10, "download", slow)
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda _: message(tmp_path, download=True), range(2)):
            assert "no network" in text
    assert most == 1


def test_nothing_is_downloaded_over_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "download", lambda self: pytest.fail("downloaded"))
    assert load(write_tree(tmp_path), download=True).train_size == 12


# --- official python batches ------------------------------------------------------------------------------------------


def write_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write six batches of four images each, and let torchvision accept their checksums."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(number: int) -> dict[str, object]:
        images = [pixels(10 * number + k).transpose(2, 0, 1).reshape(-1) for k in range(4)]
        return {"data": np.stack(images), "labels": [(number + k) % 10 for k in range(4)]}

    train = [write(f"data_batch_{number}", batch(number)) for number in range(1, 6)]
    test = [write("test_batch", batch(6))]
    meta = write("batches.meta", {"label_names": [f"class{k}" for k in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", test)
    monkeypatch.setattr(CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    return folder


def test_batches_are_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_batches(tmp_path, monkeypatch)
    data = load(tmp_path)
    assert data.description == "CIFAR-10 (python batches)"
    assert (data.classes, data.input_shape, data.train_size, data.test_size) == (10, (3, 32, 32), 20, 4)
    assert data._train.images[6].permute(1, 2, 0).numpy().tolist() == pixels(22).tolist()
    assert data._train.labels[4:8].tolist() == [2, 3, 4, 5]
    assert data._test.labels.dtype == torch.int64
    assert data._train.images.is_contiguous()
    assert load(folder).fingerprint() == data.fingerprint()  # the folder itself will do


def test_the_first_batch_of_training_is_on_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batches(tmp_path, monkeypatch)
    (batch,) = load(tmp_path).train_batches([3], batch_size=8, parts=2, seed=0, device=torch.device("cpu"))
    assert batch.inputs(1).shape == (4, 3, 32, 32)
    assert batch.targets(1).shape == (4,)


def test_damaged_and_missing_batches_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_batches(tmp_path, monkeypatch)
    (folder / "data_batch_3").write_bytes(b"cut")
    (folder / "test_batch").unlink()
    text = message(tmp_path)
    assert f"2 of 7 files in {folder} are unusable: data_batch_3 (damaged), test_batch (missing)." in text
    assert "dataset.download=true" in text


def test_damaged_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_batches(tmp_path, monkeypatch)
    (folder / "batches.meta").write_bytes(b"cut")
    assert "1 of 7 files" in message(tmp_path)


def test_a_file_that_torchvision_does_not_know_is_never_unpickled(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # a pickle that would run a program
    assert "data_batch_1 (damaged)" in message(tmp_path)
