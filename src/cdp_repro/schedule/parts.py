"""Cuts bytes into equal parts: a stage into shards, a large message into smaller ones."""

from __future__ import annotations

_ALIGNMENT = 16
"""Bytes of the largest number: no number is cut in two."""


def part_bytes(size: int, parts: int) -> int:
    """Return the bytes of each of `parts` equal parts of `size` bytes; the last part may be shorter."""
    return _ALIGNMENT * -(-size // (_ALIGNMENT * parts))


def part_of(size: int, part: int, parts: int) -> range:
    """Return the range of the `size` bytes in a part. Parts count from 1; the last ones may be short or empty."""
    each = part_bytes(size, parts)
    return range(min(size, (part - 1) * each), min(size, part * each))
