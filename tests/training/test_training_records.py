"""What a rank writes while it trains."""

from __future__ import annotations

import logging
from pathlib import Path

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


class Told(logging.Handler):
    """Keeps the warnings that people see."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("error", [None, ValueError("its own error")])
def test_a_log_on_a_full_disk_warns_once_and_ends_no_run(tmp_path, capsys, monkeypatch, error):
    told = Told()
    monkeypatch.setattr(LOGGER, "propagate", False)
    monkeypatch.setattr(LOGGER, "handlers", [told])
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    try:
        with log_file(tmp_path / "rank0.log"):
            LOGGER.info("one")
            LOGGER.info("two")
            if error is not None:
                raise error
    except ValueError as raised:
        assert raised is error
    else:
        assert error is None
    path = tmp_path / "rank0.log"
    assert told.messages == [f"warning: cannot write to {path}, which lacks lines: No space left on device"]
    assert "Logging error" not in capsys.readouterr().err
