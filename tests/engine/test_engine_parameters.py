"""Where an update writes: out of place while the old version has readers, in place when it has none."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.parameters import StageState, average
from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.values import Kind


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
    return StageState(dict(nn.Linear(2, 2, bias=False).named_parameters()), optimizer)


def ones():
    return {"weight": torch.ones(2, 2)}


def test_an_update_leaves_the_old_version_as_it_was():
    state = stage()
    first = state.newest(0)
    old = first.tensors["weight"].clone()
    second = state.update(first, ones(), 1.0)
    assert (first.number, second.number) == (0, 1)
    assert torch.equal(first.tensors["weight"], old)
    assert torch.equal(second.tensors["weight"], old - 0.5)


def test_the_last_use_of_a_version_gives_its_tensors_to_the_next():
    state = stage()
    first = state.newest(0)
    old, place = first.tensors["weight"].clone(), first.tensors["weight"].data_ptr()
    second = state.update(first, ones(), 1.0, in_place=True)
    assert second.number == 1 and second.tensors["weight"].data_ptr() == place
    assert torch.equal(second.tensors["weight"], old - 0.5)


def test_what_the_stage_holds_is_always_the_newest_version():
    state = stage()
    version = state.newest(0)
    for in_place in (False, True, False):
        version = state.update(version, ones(), 1.0, in_place=in_place)
        assert torch.equal(state.newest(version.number).tensors["weight"], version.tensors["weight"])


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=0.5), Greedy, partial(Greedy, from_second=True)])
def test_a_sum_that_others_will_ask_for_stays_as_it_is(optimizer):
    state = stage(optimizer)
    version = state.newest(0)
    for _ in range(3):
        gradients = ones()
        version = state.update(version, gradients, 1.0, gradients_are_ours=False)
        assert torch.equal(gradients["weight"], torch.ones(2, 2))


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
def test_the_engine_writes_in_place_just_where_the_update_frees_its_start(mode, monkeypatch):
    """As the program says, and never into a version that is read again."""
    asked, freed = [], []
    honest = StageState.update

    def update(self, version, gradients, factor, *, in_place, gradients_are_ours):
        asked.append((in_place, gradients_are_ours))
        return honest(self, version, gradients, factor, in_place=in_place, gradients_are_ours=gradients_are_ours)

    monkeypatch.setattr(StageState, "update", update)
    engine = Engine([nn.Linear(2, 2) for _ in range(3)], lambda output, _: output.mean(),
                    lambda parameters: torch.optim.SGD(parameters, lr=0.5), mode)  # fmt: skip
    for _ in engine.run([(torch.ones(3, 2), torch.ones(3))] * 4):
        pass
    for slot in Program(Schedule.build(mode, 3)).slots(4):
        for action in slot.actions:
            if action.op is Op.UPDATE:
                before, total = action.reads
                freed.append((before in action.frees, total in action.frees))
    assert asked == freed


@pytest.mark.parametrize(("mode", "stages"), [("dp", {0, 1, 2}), ("cdp_v2", {2}), ("cdp_v1", set())])
def test_on_one_device_stages_without_stale_readers_are_updated_in_place(mode, stages):
    found = {action.stage for slot in Program(Schedule.build(mode, 3)).slots(4) for action in slot.actions
             if action.op is Op.UPDATE and action.version > 1 and slot.number < 20
             and any(value.kind == Kind.PARAMETERS for value in action.frees)}  # fmt: skip
    assert found == stages


def test_a_mean_of_equal_buffers_is_what_they_are():
    """A sum of masks that hold the lowest number there is would be -inf, and of thirds not three thirds."""
    generator = torch.Generator().manual_seed(0)
    same = {"mask": torch.full((3,), torch.finfo(torch.float32).min), "table": torch.rand(1000, generator=generator)}
    means = average([{name: each.clone() for name, each in same.items()} for _ in range(3)])
    assert all(torch.equal(means[name], same[name]) for name in same)


def test_buffers_of_all_kinds_of_numbers_with_fractions_are_averaged():
    for kind in (torch.float32, torch.bfloat16, torch.complex64):
        sets = [{"mean": torch.full((2,), value, dtype=kind)} for value in (1.0, 2.0, 6.0)]
        assert torch.equal(average(sets)["mean"], torch.full((2,), 3.0, dtype=kind))
    counts = [{"batches": torch.tensor(count)} for count in (4, 7)]
    assert average(counts)["batches"] == 4, "whole numbers are those of set 0"


@pytest.mark.parametrize("factor", [1, np.float32(0.5), np.int64(1), torch.tensor(0.5)])
def test_a_factor_on_the_learning_rate_is_any_number(factor):
    state = stage()
    first = state.newest(0)
    changed = state.update(first, ones(), factor).tensors["weight"] - first.tensors["weight"]
    assert torch.allclose(changed, torch.tensor(-0.5 * float(factor)))


def test_sets_of_a_buffer_that_have_grown_apart_are_refused_by_its_name():
    with pytest.raises(ValueError, match=r"buffer mask have the shapes \(2,\), \(4,\): .* keep \(2,\) from the start"):
        average([{"mask": torch.ones(2)}, {"mask": torch.ones(4)}])
