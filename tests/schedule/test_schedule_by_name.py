"""Things that installed packages enter: looked up by name, and refused if they are something else."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from cdp_repro.schedule import MODES, PLACEMENTS, TIMELINES, by_name
from cdp_repro.schedule.by_name import ByName, EntryError


@pytest.fixture
def entered(monkeypatch):
    """Enter something under the name `mine` in all groups."""

    def enter(value: str) -> None:
        monkeypatch.setattr(
            by_name,
            "_entries",
            lambda group, name: [EntryPoint(name, value, f"cdp_repro.{group}")] if name == "mine" else [],
        )

    return enter


def test_what_is_entered_is_found_by_its_name(entered):
    entered("builtins:len")
    found = ByName("functions", {"ours": len}, callable, "a function")
    assert "mine" in found and found["mine"] is len and "other" not in found
    with pytest.raises(KeyError):
        found["other"]


@pytest.mark.parametrize(
    ("group", "kind"),
    [(MODES, "a Mode"), (PLACEMENTS, "a subclass of Placement"), (TIMELINES, "a subclass of Timeline")],
)
@pytest.mark.parametrize(("value", "found"), [("sys:maxsize", "int"), ("builtins:int", "type")])
def test_something_else_is_refused_with_its_place_and_what_is_wanted(entered, group, kind, value, found):
    entered(value)
    with pytest.raises(EntryError, match=f"'mine', .* has entered as {value}, is of the type {found}: give {kind}$"):
        group["mine"]
    assert "mine" not in dict(group)


def test_what_cannot_be_imported_is_refused_with_the_cause(entered):
    entered("nowhere_at_all:x")
    with pytest.raises(EntryError, match=r"cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"):
        MODES["mine"]
