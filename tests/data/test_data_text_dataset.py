"""Text: tokens and their successors, the validation tail, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from pathlib import Path

import pytest
import torch

from cdp_repro.data import DatasetError, load_dataset
from cdp_repro.data.order import epoch_order

CPU = torch.device("cpu")
TEXT = "".join(chr(ord("a") + number % 23) for number in range(400)) + "äöü" * 4


def load(root, context=8, tokens="bytes"):
    return load_dataset("text", root=str(root), context=context, tokens=tokens)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


def test_each_token_is_followed_by_its_successor_and_each_sequence_is_there_once(file):
    data = load(file)
    raw = torch.tensor([*TEXT.encode()])
    assert (data.classes, data.input_shape) == (256, (8,))
    order = epoch_order(data.train_size, 3, 0)
    seen = []
    for batch in data.train_batches(range(data.train_size // 4), batch_size=4, parts=2, seed=3, device=CPU):
        for part in range(2):
            inputs, targets = batch.inputs(part), batch.targets(part)
            assert inputs.shape == targets.shape == (2, 8) and inputs.dtype == targets.dtype == torch.int64
            for row, following in zip(inputs, targets, strict=True):
                number = int(order[len(seen)])
                assert torch.equal(row, raw[8 * number : 8 * number + 8])
                assert torch.equal(following, raw[8 * number + 1 : 8 * number + 9])
                seen.append(number)
    assert len(set(seen)) == len(seen) == data.train_size // 4 * 4


def test_the_tail_is_for_validation_and_in_order(file):
    data = load(file)
    raw = [*TEXT.encode()]
    tail = raw[-(len(raw) // 10) :]
    batches = [*data.test_batches(2, device=CPU)]
    inputs, targets = (torch.cat(parts).flatten().tolist() for parts in zip(*batches, strict=True))
    assert len(inputs) == 8 * data.test_size == (len(tail) - 1) // 8 * 8
    assert inputs == tail[: len(inputs)] and targets == tail[1 : len(inputs) + 1]
    assert [len(part) for part, _ in batches] == [2, 2, 1]


def test_characters_are_numbered_by_code_point(file):
    data = load(file, tokens="characters")
    letters = sorted(set(TEXT))
    assert data.classes == len(letters) == 26
    assert [letters[number] for number in data.train_tokens] == [*TEXT[: len(data.train_tokens)]]


def test_bits_a_byte_take_the_bytes_of_characters_into_account(tmp_path):
    path = tmp_path / "umlauts"
    path.write_text("ä" * 200)
    means = {"eval/top1_percent": 7.0, "eval/top5_percent": 8.0, "eval/loss": math.log(2)}
    assert load(path, tokens="characters").metrics(means) == {
        "eval/top1_percent": 7.0, "eval/top5_percent": 8.0, "eval/nats_per_token": math.log(2),
        "eval/bits_per_byte": pytest.approx(0.5),
    }  # fmt: skip
    assert load(path).metrics(means)["eval/bits_per_byte"] == pytest.approx(1)


def test_bits_a_byte_count_the_bytes_of_what_is_predicted(tmp_path):
    path = tmp_path / "one"
    path.write_text("a" * 180 + "ä" + "a" * 19)  # the validation part begins with ä, which nothing predicts
    means = {"eval/top1_percent": 7.0, "eval/top5_percent": 8.0, "eval/loss": math.log(2)}
    assert load(path, tokens="characters").metrics(means)["eval/bits_per_byte"] == pytest.approx(1)


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(TEXT, encoding="utf-8-sig")
    data = load(tmp_path, tokens="characters")
    assert data.classes == 27, "the letters, and the line end between the files"


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name, text in (("b.txt", "b" * 100), ("a/z.txt", "a" * 100), (".hidden", "x" * 100), (".git/x", "x" * 100)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    data = load(tmp_path)
    assert bytes(data.train_tokens.tolist()).startswith(b"a" * 100 + b"\nb") and "2 files" in data.description


def test_the_default_is_on_every_machine():
    data = load_dataset("text")
    source = Path(asyncio.__file__).read_bytes()
    assert bytes(data.train_tokens[: len(source)].tolist()) == source
    assert data.train_size * 128 > 500_000 and data.fingerprint() == load_dataset("text").fingerprint()


def test_the_fingerprint_depends_on_the_text_and_on_its_cut(file):
    first = load(file).fingerprint()
    assert first == load(file).fingerprint() and len(first) == 16
    others = {load(file, context=9).fingerprint(), load(file, tokens="characters").fingerprint()}
    file.write_text(TEXT + "!")
    assert len({first, load(file).fingerprint(), *others}) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: give a file with text"),
        (b"abc\xff", "is not UTF-8 text: byte 3 is 0xff"),
        (b"abc\0" * 100, "is binary: it holds the byte 0 at 3"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is binary: it holds the byte 0 at 8"),
        ("a text".encode("utf-16"), "is not UTF-8 text: byte 0 is 0xff; convert it, e.g. by iconv -f utf-16 -t utf-8"),
        (b"a" * 50, "has 45 bytes for training and 5 for validation, but model.context=8 needs at least 9 of each: use "
                    "model.context=4 or less"),
        (b"a", "use a longer text"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path, content, words):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=words):
        load(path)


def test_all_files_that_are_no_text_are_told_of_at_once(tmp_path):
    for number in range(13):
        (tmp_path / f"{number:02}").write_bytes(b"abc\0")
    (tmp_path / "good").write_text(TEXT)
    with pytest.raises(DatasetError) as caught:
        load(tmp_path)
    said = str(caught.value).splitlines()
    assert (
        len(said) == 11 and "00 is binary" in said[0] and "09 is binary" in said[9] and said[10] == "and 3 more files"
    )


def test_missing_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="nowhere does not exist: give a UTF-8 file"):
        load(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="/dev/null is no file: give a UTF-8 file"):
        load("/dev/null")
    with pytest.raises(DatasetError, match="is a folder without text: give a UTF-8 file"):
        load(tmp_path)


def test_an_empty_root_is_an_unset_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    assert load("").fingerprint() == load_dataset("text", context=8, tokens="bytes").fingerprint()


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(DatasetError, match=f"dataset.root={tmp_path} is a folder that you may not read"):
        load(tmp_path)


def test_what_may_not_even_be_looked_for_is_named(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/closed/data")

    monkeypatch.setattr("cdp_repro.data.text_dataset.load_text", refused)
    with pytest.raises(DatasetError, match="/closed/data: Permission denied: give a dataset"):
        load_dataset("text")
