"""Numbers and tables as text for people."""

from __future__ import annotations

from collections.abc import Sequence

_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def byte_unit(largest: float) -> tuple[int, str]:
    """Return the size and the name of the unit that suits numbers up to `largest` bytes."""
    return next(((unit, name) for unit, name in _BYTE_UNITS if largest >= unit), (1, "bytes"))


def format_bytes(number: float) -> str:
    """Return a number of bytes with four digits, e.g. 12.35 MiB."""
    unit, name = byte_unit(number)
    return f"{number / unit:.4g} {name}"


def format_quantity(name: str, value: float) -> str:
    """Return a number in the unit that its name tells: `..._bytes...`, `idle_share`, or a plain number."""
    if "bytes" in name:
        return format_bytes(value)
    return f"{100 * value:.1f} %" if name == "idle_share" else f"{value:.10g}"


def several(items: Sequence[object], limit: int = 5) -> str:
    """Return the first `limit` items, comma separated, and how many more there are."""
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return ", ".join(str(item) for item in items[:limit]) + more


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def mode_text(mode: str, delay: str) -> str:
    """Return how people are told what runs: the mode, with the method against delay if there is one."""
    return mode if delay == "none" else f"{mode} with {delay}"
