"""Files that are replaced whole, and what is never replaced."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from cdp_repro.observe.atomic_file import replace_file, replacing


def test_a_file_is_replaced_whole_and_leaves_nothing_else(tmp_path):
    for content in (b"old", b"new"):
        replace_file(tmp_path / "file", content)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}


def test_a_text_that_fails_half_way_leaves_the_old_one(tmp_path):
    replace_file(tmp_path / "file", b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "file") as file:
        file.write("new")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_bytes() == b"old"
    with replacing(tmp_path / "file") as file:
        file.write("a\r\nb\n")
    assert (tmp_path / "file").read_bytes() == b"a\r\nb\n"


def test_a_link_stays_one(tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_pipe_or_a_device_is_written_to_and_stays_what_it_is(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    replace_file(pipe, b"said")
    reader.join(10)
    assert read == [b"said"] and pipe.is_fifo()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        replace_file(Path(tmp_path), b"")


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_half_written(tmp_path, monkeypatch):
    replace_file(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
