"""What a rank writes while it trains."""

from __future__ import annotations

import logging

import pytest

from cdp_repro.training.records import log_file

LOGGER = logging.getLogger("cdp_repro")


def test_the_log_takes_names_that_are_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(LOGGER, "propagate", False)  # pytest's processes send what it captures
    with log_file(tmp_path / "logs" / "rank0.log"):
        LOGGER.warning("a file \udcff.png")
    assert (tmp_path / "logs" / "rank0.log").read_text().endswith("WARNING a file \\udcff.png\n")


def test_the_log_has_the_traceback_of_what_ends_the_run_and_nothing_from_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(LOGGER, "propagate", False)
    monkeypatch.setattr(LOGGER, "level", logging.WARNING)
    with pytest.raises(KeyError), log_file(tmp_path / "rank0.log"):
        LOGGER.debug("before")
        raise KeyError("lost")
    LOGGER.warning("written later")
    written = (tmp_path / "rank0.log").read_text()
    assert "DEBUG before" in written and "written later" not in written
    assert written.endswith("KeyError: 'lost'\n")
    assert LOGGER.level == logging.WARNING
