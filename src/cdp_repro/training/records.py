"""What is written while a run trains: the log of each rank, and the metrics and the W&B mirror of rank 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cdp_repro.config import RunConfig
from cdp_repro.observe.metrics import MetricsLog
from cdp_repro.observe.run_directory import RunDirectory, writing
from cdp_repro.observe.wandb_mirror import WandbMirror, previous_run_id

logger = logging.getLogger("cdp_repro")


@dataclass(frozen=True)
class Records:
    """The records that rank 0 writes while it trains."""

    metrics: MetricsLog
    mirror: WandbMirror


@contextmanager
def opened_records(config: RunConfig, directory: RunDirectory) -> Iterator[Records]:
    """Open the metrics and start the W&B mirror; an error in the body ends the mirror as failed."""
    mirror = WandbMirror()
    mirror.start(
        config.wandb,  # type: ignore[arg-type]  # one of the choices, as config checks
        directory.path,
        config.to_dict(),
        name=directory.path.name,
        project=config.wandb_project,
        group=directory.sweep,
        resume_id=previous_run_id(directory.path),
    )
    try:
        yield Records(MetricsLog(directory.metrics_path, mirror), mirror)
    finally:
        mirror.finish({}, exit_code=1)  # does nothing after the regular end


class _LogFile(logging.FileHandler):
    """A log that a full disk cuts short: it is a copy for people, for which no run should end."""

    def __init__(self, path: Path) -> None:
        # a message may name a file whose name is no text
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Warn once where a line cannot be written; the other handlers have it."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("warning: cannot write to %s, which lacks lines: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file, whether or not its last lines can be written."""
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Copy the log of the package to `path`, with the traceback of an error in the body."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # on another host there is no run directory yet
        handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    except Exception:
        logger.debug("the run ends", exc_info=True)
        raise
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
