"""Bytes in equal parts."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule.parts import part_bytes, part_of


@given(size=st.integers(0, 10**6), parts=st.integers(1, 200))
@settings(derandomize=True)
def test_parts_follow_one_another_cover_all_bytes_and_cut_no_value(size, parts):
    found = [part_of(size, part, parts) for part in range(1, parts + 1)]
    assert [byte for part in found for byte in (part.start, part.stop)] == sorted(
        byte for part in found for byte in (part.start, part.stop)
    )
    assert found[0].start == 0 and found[-1].stop == size
    assert all(before.stop == after.start for before, after in itertools.pairwise(found))
    assert all(part.stop % 16 == 0 for part in found if part.stop < size)
    assert {len(part) for part in found if part.stop < size} <= {part_bytes(size, parts)}


def test_the_last_may_be_shorter_or_empty():
    assert [part_of(100, part, 3) for part in (1, 2, 3)] == [range(48), range(48, 96), range(96, 100)]
    assert part_of(16, 2, 2) == range(16, 16)
