"""Things chosen by name, from this package or from one that the user has installed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TypeVar

T = TypeVar("T")


class EntryError(ValueError):
    """An entry point of an installed package cannot be imported, or is something else than it should be."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'x'?" for the known name that is most similar; "" if none is."""
    found = difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def is_subclass_of(base: type) -> Callable[[object], bool]:
    """Return the function that tells whether something is a subclass of `base`."""
    return lambda found: isinstance(found, type) and issubclass(found, base)


class ByName(dict[str, T]):
    """Things of one kind by name; a missing name is looked up in the entry points of installed packages.

    A package declares its additions in its `pyproject.toml`, and every rank finds them there:

        [project.entry-points."cdp_repro.modes"]
        spaced = "my_schedules:SPACED"

    An addition is imported when its name is first asked for, and is not listed before.
    """

    def __init__(self, group: str, known: dict[str, T], is_one: Callable[[object], bool], kind: str) -> None:
        """`group`: name of the entry points after `cdp_repro.`; `is_one` tells whether an entry is of the `kind`."""
        super().__init__(known)
        self._group, self._is_one, self._kind = group, is_one, kind

    def __contains__(self, name: object) -> bool:
        """Whether the name is known, here or in an installed package."""
        return super().__contains__(name) or self._find(name)

    def __missing__(self, name: str) -> T:
        """Return what an installed package has entered under this name."""
        if self._find(name):
            return self[name]
        raise KeyError(name)

    def _find(self, name: object) -> bool:
        """Take over what an installed package has entered under this name; return whether one has.

        Raises:
            EntryError: the entry cannot be imported, or is something else.
        """
        for entry in _entries(self._group, str(name)):
            with refusing(f"{_told(entry)} cannot be imported", EntryError):
                found = entry.load()
            if not self._is_one(found):
                raise EntryError(f"{_told(entry)} is of the type {type(found).__name__}: give {self._kind}")
            self[entry.name] = found
            return True
        return False


def is_entered(group: str, name: str) -> bool:
    """Whether an installed package has entered something of this kind under this name; imports nothing."""
    return bool(_entries(group, name))


def entered(group: str) -> list[str]:
    """Return the names that installed packages have entered in a group; imports nothing."""
    return sorted({entry.name for entry in entry_points(group=f"cdp_repro.{group}")})


@cache
def _entries(group: str, name: str) -> EntryPoints:
    return entry_points(group=f"cdp_repro.{group}", name=name)


@contextmanager
def refusing(what: str, refusal: type[ValueError]) -> Iterator[None]:
    """Raise what code of an installed package raises, which can be anything, as a `refusal` that begins with `what`."""
    try:
        yield
    except refusal:
        raise
    except Exception as error:
        raise refusal(f"{what}: {type(error).__name__}: {error}") from error


def _told(entry: EntryPoint) -> str:
    return f"{entry.group} {entry.name!r}, which an installed package has entered as {entry.value},"
