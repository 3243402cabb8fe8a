"""How bytes are cut into equal parts: a stage into shards, a message into smaller ones."""

from __future__ import annotations

_ALIGNMENT = 16
"""Bytes of the largest value: none is cut."""


def part_bytes(size: int, parts: int) -> int:
    """Return the bytes of each but the last of `parts` equal parts of `size` bytes."""
    return _ALIGNMENT * -(-size // (_ALIGNMENT * parts))


def part_of(size: int, part: int, parts: int) -> range:
    """Return which of `size` bytes are in a part, counted from 1; the last may be shorter, or empty."""
    each = part_bytes(size, parts)
    return range(min(size, (part - 1) * each), min(size, part * each))
