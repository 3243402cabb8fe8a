"""Mini-batches a few steps ahead of the training, so that a damaged image is known before its step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from cdp_repro.data import DatasetError, MiniBatch


class Lookahead:
    """Holds the mini-batches of the next `steps` training steps.

    A rank decodes only the images that it reads, so only one rank meets a damaged one. If it raised at once, the others
    would wait for its messages until they time out. Instead it keeps the error, goes on with the mini-batches it has,
    and asks all ranks to stop before the step that it cannot run.
    """

    def __init__(self, batches: Iterable[MiniBatch], steps: int) -> None:
        self._batches = iter(batches)
        self._steps = steps
        self._held: deque[MiniBatch] = deque()
        self.error: DatasetError | None = None
        """The error of the mini-batch after those held, if there is one."""
        self._fill()

    def _fill(self) -> None:
        while len(self._held) < self._steps and self.error is None:
            try:
                self._held.append(next(self._batches))
            except StopIteration:
                return
            except DatasetError as error:
                self.error = error

    @property
    def whole(self) -> int | None:
        """Number of mini-batches before the damaged one; None if none is known to be damaged."""
        return None if self.error is None else len(self._held)

    def __iter__(self) -> Iterator[MiniBatch]:
        """Yield the mini-batches; end before a damaged one."""
        while self._held:
            batch = self._held.popleft()
            self._fill()  # before the batch is trained on: a damaged next one is known before it is asked for
            yield batch
