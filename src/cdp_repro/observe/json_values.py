"""Numbers that JSON cannot hold, as text and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def valid_json(value: Any) -> Any:
    """Return `value` with each float that JSON cannot hold as the string that JavaScript and Python's `json` write."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Return "NaN", "Infinity" and "-Infinity" as floats, other values as they are."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
