"""A trace as a picture."""

from __future__ import annotations

import pytest

from cdp_repro.observe.trace_files import slots_of
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule


@pytest.mark.parametrize(("mode", "placement"), [("dp", "replicated"), ("cdp_v2", "model_parallel")])
def test_a_slot_has_the_actions_of_all_ranks(mode, placement):
    program = Program(Schedule.build(mode, 3, placement=placement))
    slots = slots_of(simulate(program, StageCosts.equal(3), steps=2))
    assert [slot.number for slot in slots] == list(range(len(slots)))
    for slot, made in zip(slots, program.slots(2), strict=False):
        assert sorted(map(str, slot.actions)) == sorted(map(str, made.actions))
        assert {action.rank for action in slot.actions} == {action.rank for action in made.actions}
