"""The user's mistakes: collected over several steps, and reported in one message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """The user's mistakes in the configuration: one message that lists each of them once.

    Two steps may find the same mistake: an override that cannot be read is found when the folder of a sweep is composed
    and again when its cells are.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = [*dict.fromkeys(problems)]
        bullets = "\n".join(f"- {problem}" for problem in self.problems)
        super().__init__(bullets if len(self.problems) > 1 else self.problems[0])


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the mistakes that the body raises to `problems`, to report them together with those of other steps."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with these mistakes, if there are any."""
    if found := [*problems]:
        raise ConfigError(found)


@contextmanager
def refusing_unresolved() -> Iterator[None]:
    """Turn the error of an interpolation that cannot be resolved into a ConfigError that says where it is."""
    try:
        yield
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([f"{where}the configuration cannot be resolved: {str(error).splitlines()[0]}"]) from error


OTHER_NAMES = {
    "learning_rate": "optim.lr", "optimizer": "optim", "max_epochs": "epochs",  "num_micro_batches": "micro_batches",
    "gradient_accumulation_steps": "accumulate", "data": "dataset", "arch": "model",
    "grad_clip": "optim.clip_norm", "gradient_clip_val": "optim.clip_norm", "max_grad_norm": "optim.clip_norm",
    "log_interval": "log_every_steps",
}  # fmt: skip
"""By the name of a setting in other trainers: its name here."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar choice, or "" if none is similar.

    The last part of a choice stands for it, too: `lr` for `optim.lr`. Swapped letters come first.
    """
    whole = {choice.lower(): choice for choice in choices}
    by_lower = {choice.rpartition(".")[-1]: whole[choice] for choice in whole} | whole
    if (ours := OTHER_NAMES.get(name.lower().rpartition(".")[-1])) in whole:
        return f"; did you mean {ours!r}?"
    swapped = [each for each in by_lower if sorted(each) == sorted(name.lower())]
    close = swapped or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
