"""The user's mistakes, all of them in one message, with the nearest name that exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """The user's mistake(s) in the configuration: one message with all of them, each once.

    Two steps may find the same one: what cannot be read is found for the folder of a sweep and for each of its cells.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = [*dict.fromkeys(problems)]
        bullets = "\n".join(f"- {problem}" for problem in self.problems)
        super().__init__(bullets if len(self.problems) > 1 else self.problems[0])


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the mistakes that the body finds to `problems`, so that `refuse` tells them with those of other steps."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with these mistakes, if there are any."""
    if found := [*problems]:
        raise ConfigError(found)


OTHER_NAMES = {
    "learning_rate": "optim.lr", "optimizer": "optim", "max_epochs": "epochs",  "num_micro_batches": "micro_batches",
    "gradient_accumulation_steps": "accumulate", "data": "dataset", "arch": "model",
}  # fmt: skip
"""What other trainers call ours."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar choice, or nothing if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    if (ours := OTHER_NAMES.get(name.lower())) in by_lower:
        return f"; did you mean {ours!r}?"
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.4)]
    return f"; did you mean {close[0]!r}?" if close else ""
