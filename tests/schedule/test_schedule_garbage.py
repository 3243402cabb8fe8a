"""Python's search for cycles stands still for a while, and goes on as it was."""

from __future__ import annotations

import gc

import pytest

from cdp_repro.schedule.garbage import without_collection


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.enable()


def test_what_was_made_meanwhile_is_not_searched_at_once():
    gc.collect()
    with without_collection():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    young = {id(each) for each in gc.get_objects(generation=0)}
    assert not any(id(each) in young for each in made)


def test_it_goes_on_after_an_error_and_only_where_it_was_on():
    with pytest.raises(ValueError), without_collection():
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()
