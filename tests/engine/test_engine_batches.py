"""Mini-batches: what the engine takes for one, and that each keeps its data until it has been read."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from small_runs import make_batches, make_engine

NamedBatch = namedtuple("NamedBatch", ["inputs", "targets"])


def losses(batches, mode="cdp_v2", **choices):
    return [result.losses for result in make_engine(mode, "single_device", 3, 3, **choices).run(batches)]


def refilled(batches):
    """The same two tensors, with other data each time."""
    kept = tuple(torch.empty_like(part) for part in batches[0])
    for batch in batches:
        for part, new in zip(kept, batch, strict=True):
            part.copy_(new)
        yield kept


@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2"])
def test_a_batch_that_is_refilled_while_it_is_read_is_refused(mode):
    batches = make_batches(4, 3)
    assert losses(refilled(batches), "dp") == losses(batches, "dp"), "a step is over before the next is taken"
    with pytest.raises(ValueError, match=r"changed after it was given.*Give each mini-batch tensors of its own"):
        losses(refilled(batches), mode)


def test_a_named_tuple_is_a_pair_of_tensors():
    batches = make_batches(3, 3)
    assert losses([NamedBatch(*batch) for batch in batches]) == losses(batches)
