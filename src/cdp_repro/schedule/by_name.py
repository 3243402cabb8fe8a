"""What is chosen by name, from this package or from one that the user has installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


class EntryError(ValueError):
    """What an installed package has entered cannot be imported."""


class ByName(dict[str, T]):
    """Things of one kind by name; one that is missing is looked for in the entry points of installed packages.

    A package enters what it adds in its `pyproject.toml`, and every rank finds it there:

        [project.entry-points."cdp_repro.modes"]
        spaced = "my_schedules:SPACED"

    It is imported when its name is first asked for, and not listed before.
    """

    def __init__(self, group: str, known: dict[str, T]) -> None:
        """`group` is the name of the entry points behind `cdp_repro.`."""
        super().__init__(known)
        self._group = group

    def __contains__(self, name: object) -> bool:
        """Whether there is one of this name, here or in an installed package."""
        return super().__contains__(name) or self._find(name)

    def __missing__(self, name: str) -> T:
        """Return what an installed package has entered under this name."""
        if self._find(name):
            return self[name]
        raise KeyError(name)

    def _find(self, name: object) -> bool:
        """Take over what an installed package has entered under this name; return whether there is such a one.

        Raises:
            EntryError: it cannot be imported.
        """
        for entry in _entries(self._group, str(name)):
            self[entry.name] = _loaded(entry)
            return True
        return False


def is_entered(group: str, name: str) -> bool:
    """Whether an installed package has entered a thing of this kind under this name; does not import it."""
    return bool(_entries(group, name))


@cache
def _entries(group: str, name: str) -> EntryPoints:
    return entry_points(group=f"cdp_repro.{group}", name=name)


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # a package of the user's can raise anything
        raise EntryError(
            f"{entry.group} {entry.name!r}, which an installed package has entered as {entry.value}, cannot be "
            f"imported: {type(error).__name__}: {error}"
        ) from error
