"""Progress for people: a bar on a terminal, plain lines elsewhere and in the log file."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger("cdp_repro")


class Progress:
    """Shows how far a run is: samples or tokens, their rate, and the time left at the rate of the last steps."""

    def __init__(
        self, total_steps: int, first_step: int, units_per_step: int, unit: str = "images", shown: bool = True
    ) -> None:
        """A training step trains on `units_per_step` images, or whatever `unit` is."""
        is_hidden = not (shown and sys.stderr.isatty())
        self._units_per_step = units_per_step
        self._bar = tqdm(
            total=total_steps * units_per_step, initial=first_step * units_per_step, unit=f" {unit}", unit_scale=True,
            disable=is_hidden, leave=False,
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def step(self, loss: float, idle_share: float | None = None) -> None:
        """Count one training step; `idle_share`, 0 to 1, is the idle share of the slots of all ranks, if known yet."""
        idle = {} if idle_share is None else {"idle": f"{100 * idle_share:.0f}%"}
        self._bar.set_postfix({"loss": f"{loss:.4f}", **idle}, refresh=False)
        self._bar.update(self._units_per_step)

    def line(self, text: str) -> None:
        """Log a line without tearing the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            logger.info(text)
