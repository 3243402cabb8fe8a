"""The package is laid out so that a reader finds things: beside the layers that `lint-imports` checks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cdp_repro

PACKAGE = Path(cdp_repro.__file__).parent
FACES = {"__init__.py"}


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.name not in FACES)
    assert not {name for name, number in names.items() if number > 1}


def test_no_module_lies_loose_at_the_top():
    assert {path.name for path in PACKAGE.glob("*.py")} == FACES


def test_no_two_test_modules_have_one_name():
    names = Counter(path.stem for path in Path(__file__).parent.rglob("test_*.py"))
    assert not {name for name, number in names.items() if number > 1}
