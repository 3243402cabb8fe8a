"""Standard streams that cannot be written: what is left of them is lost, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdp_repro.launch.full_streams import discard_what_cannot_be_written

PROGRAM = """
import sys
from cdp_repro.launch.full_streams import discard, discard_what_cannot_be_written
sys.stdout.write("lost")
{discards}
"""


@pytest.mark.parametrize(
    ("discards", "code"), [("", 120), ("discard_what_cannot_be_written()", 0), ("discard(sys.stdout)", 0)]
)
def test_a_process_whose_output_cannot_be_written_ends_well_once_it_is_discarded(discards, code, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("w") as full:
        program = [sys.executable, "-c", PROGRAM.format(discards=discards)]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == code, done.stderr


def test_a_stream_that_is_missing_is_passed_over(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    discard_what_cannot_be_written()
    assert capsys.readouterr() == ("", "")
