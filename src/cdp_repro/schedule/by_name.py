"""Things chosen by name, from this package or from one that the user has installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


class EntryError(ValueError):
    """An entry point of an installed package cannot be imported."""


class ByName(dict[str, T]):
    """Things of one kind by name; a missing name is looked up in the entry points of installed packages.

    A package declares its additions in its `pyproject.toml`, and every rank finds them there:

        [project.entry-points."cdp_repro.modes"]
        spaced = "my_schedules:SPACED"

    An addition is imported when its name is first asked for, and is not listed before.
    """

    def __init__(self, group: str, known: dict[str, T]) -> None:
        """`group` is the name of the entry points after `cdp_repro.`."""
        super().__init__(known)
        self._group = group

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
            EntryError: the entry cannot be imported.
        """
        for entry in _entries(self._group, str(name)):
            self[entry.name] = _loaded(entry)
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


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # a user's package can raise anything
        raise EntryError(
            f"{entry.group} {entry.name!r}, which an installed package has entered as {entry.value}, cannot be "
            f"imported: {type(error).__name__}: {error}"
        ) from error
