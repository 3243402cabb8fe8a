"""Progress for people: a bar on a terminal, plain lines elsewhere and in the log file."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger("cdp_repro")


class Progress:
    """Shows how far a run is, in training steps."""

    def __init__(self, total_steps: int, first_step: int, shown: bool = True) -> None:
        is_hidden = not (shown and sys.stderr.isatty())
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", disable=is_hidden, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def step(self, loss: float) -> None:
        """Count one training step."""
        self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self._bar.update()

    def line(self, text: str) -> None:
        """Log a line without tearing the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            logger.info(text)
