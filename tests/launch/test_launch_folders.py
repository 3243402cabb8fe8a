"""Temporary folders that killed processes have left are removed by the next one; others are not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from cdp_repro.launch.folders import temporary_folder

LONG_AGO = (1.0, 1.0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(place: Path, name: str) -> Path:
    """A folder as a killed process leaves it."""
    folder = place / name
    folder.mkdir()
    (folder / "0.value").write_text("x")
    (folder / ".lock").touch()
    os.utime(folder, LONG_AGO)
    return folder


def test_it_is_there_in_the_body_only(place):
    with temporary_folder() as folder:
        assert folder.parent == place and folder.is_dir()
    assert list(place.iterdir()) == []


def test_what_killed_processes_have_left_is_removed(place):
    left(place, "cdp-repro-1"), left(place, "cdp-repro-2")
    with temporary_folder() as folder:
        assert list(place.iterdir()) == [folder]


def test_what_may_be_in_use_or_is_of_others_stays(place, monkeypatch):
    (place / "cdp-repro-young").mkdir()
    other = left(place, "something-else")
    of_the_user = left(place, "cdp-repro-clone")
    (of_the_user / ".lock").unlink()
    os.utime(of_the_user, LONG_AGO)
    with temporary_folder() as first:
        os.utime(first, LONG_AGO)
        with temporary_folder() as second:
            assert {*place.iterdir()} == {place / "cdp-repro-young", other, of_the_user, first, second}
    of_another_user = left(place, "cdp-repro-3")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with temporary_folder():
        assert of_another_user.exists()
