"""Where an update writes: out of place while the old version has readers, in place when it has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cdp_repro.engine.executor import _last_uses
from cdp_repro.engine.parameters import StageState
from cdp_repro.schedule import Action, Schedule, Slot


class Greedy(torch.optim.SGD):
    """Writes into gradients, from its second step on if `from_second`."""

    def __init__(self, parameters, from_second=False):
        super().__init__(parameters, lr=0.5)
        self.calls = int(not from_second)

    def step(self, closure=None):
        if self.calls:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(2)
        self.calls += 1
        return super().step(closure)


def stage(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5)):
    state = StageState(dict(nn.Linear(2, 2, bias=False).named_parameters()), optimizer)
    state.keep_total(1, {"weight": torch.ones(2, 2)})
    return state


def test_an_update_leaves_the_old_version_as_it_was():
    state = stage()
    old = state.read(0).tensors["weight"].clone()
    state.update(1.0)
    assert torch.equal(state.read(0).tensors["weight"], old)
    assert torch.equal(state.read(1).tensors["weight"], old - 0.5)


def test_the_last_use_of_a_version_gives_its_tensors_to_the_next():
    state = stage()
    old = state.read(0).tensors["weight"].clone()
    place = state.read(0).tensors["weight"].data_ptr()
    state.update(1.0, is_last_use=True)
    state.free(0)
    assert state.versions == [1] and state.read(1).tensors["weight"].data_ptr() == place
    assert torch.equal(state.read(1).tensors["weight"], old - 0.5)


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=0.5), Greedy])
def test_a_total_that_others_will_ask_for_stays_as_it_is(optimizer):
    state = stage(optimizer)
    for version in (1, 2):
        state.keep_total(version, {"weight": torch.ones(2, 2)})
        state.update(1.0, keep_total=True)
        assert torch.equal(state.total(version)["weight"], torch.ones(2, 2))


def test_an_optimizer_that_changes_its_ways_is_refused():
    state = stage(lambda parameters: Greedy(parameters, from_second=True))
    state.update(1.0, keep_total=True)
    state.keep_total(2, {"weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="Greedy has written into a gradient that other ranks still need"):
        state.update(1.0, keep_total=True)


def test_only_an_update_right_before_the_free_of_its_start_is_a_last_use():
    texts = ("U0@v2", "X0@v1", "U1@v2", "X1@v0", "U2@v2", "X0@v1", "U3@v1:total", "X3@v1:total")
    slot = Slot(0, tuple(Action.parse(text) for text in texts))
    assert {str(action) for action in _last_uses(slot)} == {"U0@v2"}


@pytest.mark.parametrize(("mode", "stages"), [("dp", {0, 1, 2}), ("cdp_v2", {2}), ("cdp_v1", set())])
def test_on_one_device_stages_without_stale_readers_are_updated_in_place(mode, stages):
    found = {action.stage for slot in Schedule.build(mode, 3).slots(range(4)) for action in _last_uses(slot)
             if action.version > 1 and slot.number < 20}  # fmt: skip
    assert found == stages
