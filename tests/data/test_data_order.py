"""The data order: a permutation per epoch, cut into micro-batches, addressed by the step number alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.data.order import epoch_order, micro_batch_indices, steps_per_epoch


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(train_size, batch_size, parts) that fit."""
    parts = draw(st.integers(1, 5))
    batch_size = parts * draw(st.integers(1, 6))
    return batch_size + draw(st.integers(0, 60)), batch_size, parts


def indices(layout: tuple[int, int, int], steps: range, seed: int) -> list[tuple[int, torch.Tensor]]:
    train_size, batch_size, parts = layout
    return list(micro_batch_indices(steps, train_size=train_size, batch_size=batch_size, parts=parts, seed=seed))


@settings(max_examples=50, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_an_epoch_is_the_head_of_one_permutation(layout: tuple[int, int, int], seed: int, epoch: int) -> None:
    train_size, batch_size, parts = layout
    per_epoch = train_size // batch_size
    batches = indices(layout, range(epoch * per_epoch, (epoch + 1) * per_epoch), seed)
    assert all(rows.shape == (parts, batch_size // parts) for _, rows in batches)
    order = epoch_order(train_size, seed, epoch)
    assert order.sort().values.tolist() == list(range(train_size))
    # Flattening rows in order is the mini-batch, hence row i is its i-th contiguous slice.
    assert torch.cat([rows.flatten() for _, rows in batches]).equal(order[: per_epoch * batch_size])


@settings(max_examples=50, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 99), start=st.integers(0, 40))
def test_a_resume_continues_the_same_sequence(layout: tuple[int, int, int], seed: int, start: int) -> None:
    whole, rest = indices(layout, range(50), seed), indices(layout, range(start, 50), seed)
    assert [step for step, _ in rest] == list(range(start, 50))
    assert all(a.equal(b) for (_, a), (_, b) in zip(whole[start:], rest, strict=True))


def test_the_partition_does_not_depend_on_the_number_of_workers() -> None:
    one, four = indices((100, 20, 1), range(12), 3), indices((100, 20, 4), range(12), 3)
    assert all(a.flatten().equal(b.flatten()) for (_, a), (_, b) in zip(one, four, strict=True))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_steps_are_taken_lazily() -> None:
    endless = micro_batch_indices(itertools.count(), train_size=10, batch_size=4, parts=2, seed=0)
    assert [step for step, _ in itertools.islice(endless, 5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("batch_size", "parts", "expected"),
    [
        (30, 4, "batch_size=30 is not divisible by parts=4: use batch_size=28 or batch_size=32"),
        (3, 4, "batch_size=3 is not divisible by parts=4: use batch_size=4$"),
        (200, 4, "batch_size=200 is larger than the training set of 100 samples; use batch_size=100 or less"),
        (0, 4, "batch_size=0 must be at least 1"),
        (4, 0, "parts=0 must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused_before_the_first_step(batch_size: int, parts: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        micro_batch_indices(range(1), train_size=100, batch_size=batch_size, parts=parts, seed=0)


def test_steps_per_epoch_drops_the_rest() -> None:
    assert (steps_per_epoch(1797, 64), steps_per_epoch(64, 64), steps_per_epoch(127, 64)) == (28, 1, 1)
