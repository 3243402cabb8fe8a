"""Where ranks stand, and who of them stalls: on a store in this process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from cdp_repro.launch import positions
from cdp_repro.launch.failures import StalledError
from cdp_repro.launch.positions import Positions

WAITED = RuntimeError("[unbound_buffer.cc:119] Timed out waiting 8000ms for recv operation to complete")
WAITED_BESIDE = RuntimeError("Application timeout caused pair closure")  # of a message in flight when another timed out
BROKEN = RuntimeError("[pair.cc:547] Connection closed by peer [10.0.0.1]:1234")


@pytest.fixture
def ranks(monkeypatch):
    for name in ("_TIMED_OUT_SECONDS", "_LOST_SECONDS"):
        monkeypatch.setattr(positions, name, 0.1)
    store = HashStore()
    return [Positions(store, 3, rank) for rank in range(3)]


@pytest.mark.parametrize("waited", [WAITED, WAITED_BESIDE])
def test_the_rank_that_says_nothing_is_named_not_the_one_that_noticed(ranks, waited):
    for rank, slot in enumerate((17, 14, 16)):
        ranks[rank].enter(f"slot {slot}: F0.m{rank}@v0")
    ranks[2].give_up(waited)
    error = ranks[0].stalled(waited)
    assert isinstance(error, StalledError) and error.ranks == (1,)
    assert str(error).splitlines() == [
        "rank 1 stalls: the others have waited for timeout_seconds in vain",
        "  rank 0 began slot 17: F0.m0@v0; it has waited in vain",
        "  rank 1 began slot 14: F0.m1@v0",
        "  rank 2 began slot 16: F0.m2@v0; it has waited in vain",
    ]


def test_a_broken_connection_is_told_from_a_stall(ranks):
    ranks[1].give_up(ValueError("an own error"))
    error = ranks[0].stalled(BROKEN)
    assert error.ranks == (2,)
    first, *rest = str(error).splitlines()
    assert first == "the connection to rank 2 is lost: look what ended there first"
    assert rest[1] == "  rank 1 has begun nothing yet; it ended with ValueError: an own error"


def test_ranks_that_wait_for_each_other_are_not_accused(ranks):
    for other in ranks[1:]:
        other.give_up(WAITED)
    error = ranks[0].stalled(WAITED)
    assert error.ranks == () and str(error).startswith("the ranks wait for each other in vain\n")


@pytest.mark.parametrize(("slow", "named"), [([0], "rank 0"), ([0, 1], "one of ranks 0, 1")])
def test_a_rank_that_was_too_slow_is_told_from_a_deadlock(ranks, slow, named):
    for rank in slow:
        ranks[rank].enter("cutting the model")
        ranks[rank].give_up(BROKEN)
    for other in ranks[len(slow) :]:
        other.give_up(WAITED)
    error = ranks[2].stalled(WAITED)
    cause, first, *_ = str(error).splitlines()
    assert error.ranks == () and cause.startswith(f"{named} kept others waiting for more than timeout_seconds: raise ")
    assert first.startswith("  rank 0 began cutting the model; it was left by the others: RuntimeError: ")


def test_a_rank_that_failed_itself_makes_none_too_slow(ranks):
    for rank, error in enumerate((ValueError("an own error"), BROKEN)):
        ranks[rank].give_up(error)
    assert str(ranks[2].stalled(WAITED)).startswith("the ranks wait for each other in vain\n")


def test_a_later_group_of_the_same_process_has_not_given_up(ranks):
    ranks[1].give_up(WAITED)
    store = ranks[1]._store
    assert "rank 1 has begun nothing yet" in Positions(store, 3, 1).report()
    assert "vain" not in Positions(store, 3, None).report()


def test_a_store_that_has_ended_with_rank_0_is_the_cause():
    class Ended:
        def set(self, *_):
            pass

        def check(self, _):
            raise RuntimeError("Broken pipe\nException raised from ...")

    error = Positions(Ended(), 2, 1).stalled(BROKEN)
    assert error.ranks == (0,)
    assert str(error).startswith("the store at which the ranks have met is gone (Broken pipe): rank 0, or what")


def test_a_process_alone_has_no_positions():
    alone = Positions(None, 1, 0)
    alone.enter("slot 0")
    alone.give_up(WAITED)
    assert alone.report() == ""
