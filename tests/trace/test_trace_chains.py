"""The longest chain of messages that follow one another in a slot."""

from __future__ import annotations

import pytest

from cdp_repro.schedule import Action
from cdp_repro.trace import longest_chain


def chain(*ranks, empty=()):
    """Of one slot, of which each rank runs its texts in order; `empty` are labels of what has no bytes."""
    actions = [Action.parse(text, rank) for rank, texts in enumerate(ranks) for text in texts]
    return longest_chain(actions, lambda action: action.label not in empty, len(ranks))


ADD = "A g0[0:2]: g0[0:1]! g0[1:2]! -> g0[0:2]"
FIRST = "S g0[0:1]>1: g0[0:1]! ->"
TAKE = "R g0[0:1]<0: -> g0[0:1]"
ON = "S g0[0:2]>2: g0[0:2]! ->"
LAST = "R g0[0:2]<1: -> g0[0:2]"


@pytest.mark.parametrize(
    ("ranks", "length"),
    [
        (([FIRST], [TAKE, ADD, ON], [LAST]), 2),
        (([FIRST], [TAKE, ON, ADD], [LAST]), 1),
        (([FIRST], [TAKE], []), 1),
        (([], [], []), 0),
        (([FIRST], [TAKE, ADD, ON], [LAST, "S g0[0:2]>0: g0[0:2]! ->"]), 3),
        (([FIRST], [TAKE, ADD, ON], ["S x1.m0>0: x1.m0! ->", LAST]), 2),
    ],
)
def test_a_message_waits_for_all_that_its_sender_has_waited_for(ranks, length):
    assert chain(*ranks) == length


def test_what_has_no_bytes_is_not_waited_for():
    assert chain([FIRST], [TAKE, ADD, ON], [LAST], empty={"S g0[0:1]>1"}) == 1


@pytest.mark.parametrize(
    ("value", "read", "length"), [("g0[0:3]", "g0[{0}:{1}]", 4), ("pf0.m{0}@v1", "p0@v1#{1}/3", 2)]
)
def test_a_collective_takes_the_hops_of_its_ring_after_all_that_any_rank_has_waited_for(value, read, length):
    parts = [f"C {value}: {read} -> {value}".format(rank, rank + 1) for rank in range(3)]
    assert chain(*([part] for part in parts)) == length
    late = [["S x1.m9>1: x1.m9! ->", parts[0]], ["R x1.m9<0: -> x1.m9", _reading_x, parts[1]], [parts[2]]]
    assert chain(*late) == length + 1


_reading_x = "F1.m9@v0: x1.m9! p1@v0 b1.w0! -> s1.m9 d1.m9 b1.w0"
