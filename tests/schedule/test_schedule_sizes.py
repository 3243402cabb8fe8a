"""The five numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.schedule.sizes import Sizes


def test_products_are_named():
    sizes = Sizes(stages=12, workers=3, accumulate=4, replicas=2, pipeline_ranks=6)
    assert (sizes.lanes, sizes.turns, sizes.micro_batches) == (6, 12, 24)
    sizes.check()


@pytest.mark.parametrize(("n", "m", "sets"), [(4, 6, 2), (4, 5, 1), (4, 8, 4), (3, 9, 3)])
def test_any_number_of_micro_batches_and_as_many_sets_of_statistics_as_divide_it(n, m, sets):
    sizes = Sizes(stages=12, workers=n, replicas=2, chosen_turns=m)
    assert (sizes.lanes, sizes.turns, sizes.micro_batches, sizes.statistics) == (2 * n, m, 2 * m, 2 * sets)


def test_slices_are_numbered_by_their_backwards():
    sizes = Sizes(stages=2, workers=2, slices=3)
    assert (sizes.micro_batches, sizes.sample_parts, sizes.lanes) == (6, 2, 6)
    assert [sizes.place(m) for m in range(6)] == [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]
    assert [sizes.tokens_before(m) for m in range(6, 12)] == [7, 8, None, 10, 11, None]
    assert [sizes.tokens_after(m) for m in range(6, 12)] == [None, 6, 7, None, 9, 10]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
@settings(derandomize=True)
def test_each_slice_of_each_part_of_the_samples_is_one_micro_batch(n, k, r, slices):
    sizes = Sizes(2, n, k, r, slices=slices)
    places = [sizes.place(m) for m in range(sizes.micro_batches)]
    assert sorted(places) == [(part, each) for part in range(n * k * r) for each in range(slices)]
    for m, (part, each) in enumerate(places):
        assert sizes.place(sizes.with_samples(part))[0] == part
        before, after = sizes.tokens_before(m), sizes.tokens_after(m)
        assert (before is None) == (each == 0) and (before is None or sizes.place(before) == (part, each - 1))
        assert (after is None) == (each == slices - 1) and (after is None or sizes.tokens_before(after) == m)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stages": 0}, "stages=0: at least 1"),
        ({"workers": 0}, "workers=0: at least 1"),
        ({"accumulate": 0}, "accumulate=0: at least 1"),
        ({"replicas": 0}, "replicas=0: at least 1"),
        ({"slices": 0}, "slices=0: at least 1"),
        ({"pipeline_ranks": 4}, "ranks=4 does not divide stages=6: use ranks=1, 2, 3, 6"),
        ({"pipeline_ranks": 0}, "use ranks=1, 2, 3, 6"),
        ({"message_time": 11}, "message_time=11: use a number from 0 to 10 .* such as message_time=1"),
        ({"speeds": (1, 7), "message_time": 0.1}, "at most 60 for a micro-batch"),
        ({"speeds": (1.5, 2)}, "use integers from 1"),
    ],
)
def test_refusals_name_a_value_that_works(values, said):
    with pytest.raises(ValueError, match=said):
        Sizes(**{"stages": 6, "workers": 2, **values}).check()
