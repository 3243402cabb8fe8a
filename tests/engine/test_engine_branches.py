"""Stages that read the outputs of several others: against plain modules, in float64, and byte by byte."""

from __future__ import annotations

import pytest
import reference
import torch
import torch.nn.functional as F
from small_runs import make_batches
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program
from cdp_repro.schedule.branches import two_towers

SIX = two_towers(6)
LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01


class Sum(nn.Module):
    """Joins two towers: neither input is kept for the backward of the sum, both are for the product."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, left, right):
        return torch.tanh(self.mix(left * right + left))


def stages_of(seed=0):
    torch.manual_seed(seed)
    plain = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(6)]
    plain[4] = Sum()
    plain[5] = nn.Linear(5, 5)
    return [stage.double() for stage in plain]


class Towers(nn.Sequential):
    """The same network, written by hand."""

    def forward(self, data):
        return self[5](self[4](self[1](self[0](data)), self[3](self[2](data))))


def engine_of(mode="dp", stages=None, **choices):
    return Engine(
        stages_of() if stages is None else stages,
        F.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
        mode,
        sources=SIX,
        **{"workers": 3, **choices},
    )


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "gpipe", "one_f_one_b", "zero_bubble"])
def test_twenty_steps_are_those_of_plain_modules(mode):
    batches = make_batches(20, 3)
    engine = engine_of(mode)
    losses = [result.losses for part in (batches[:9], batches[9:]) for result in engine.run(part)]
    rule = mode if mode.startswith("cdp") else "dp"
    optimizer = reference.SGD(LR, MOMENTUM, DECAY)
    outcome = reference.train(stages_of(), F.cross_entropy, optimizer, rule, 3, batches, model_of=Towers)
    assert torch.allclose(torch.tensor(losses), torch.tensor(outcome.losses), rtol=0, atol=1e-12)
    model = engine.model()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, outcome.thetas[-1][name], rtol=0, atol=1e-12), name
    data = batches[0][0]
    by_hand = Towers(*model).eval()
    assert torch.equal(model.eval()(data), by_hand(data))


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "one_f_one_b", "zero_bubble"])
def test_bytes_are_those_simulated(mode):
    batches = make_batches(3, 3)
    sample = [part[:3].clone() for part in batches[0]]
    costs = profile_stages(Network(stages_of(), F.cross_entropy, sources=SIX), *sample)
    assert costs == profile_stages(Network(stages_of(), F.cross_entropy, sources=SIX), *sample, execute=True)
    assert costs.output_kept[1] and costs.input_kept[2] and costs.input_kept[4], "left is kept, and so is right"
    engine = engine_of(mode, traced_steps=3)
    for _ in engine.run(batches):
        pass
    simulated = simulate(Program(engine.schedule), costs, 3)
    assert [r.activation_peak_bytes for r in engine.trace().records] == [
        r.activation_peak_bytes for r in simulated.records
    ]


def test_a_run_goes_on_bitwise_from_a_checkpoint():
    batches = make_batches(4, 3)
    whole, first, second = (engine_of("cdp_v2") for _ in range(3))
    losses = [result.losses for part in (batches[:2], batches[2:]) for result in whole.run(part)]
    begun = [result.losses for result in first.run(batches[:2])]
    second.load_state_dict(first.state_dict())
    assert [*begun, *(result.losses for result in second.run(batches[2:]))] == losses


def test_a_branch_without_parameters_takes_no_gradient():
    """The left tower is the data itself: nothing flows back into it, and the other one still learns."""
    stages = stages_of()
    stages[0], stages[1] = nn.Identity(), nn.Tanh()
    engine = engine_of("cdp_v1", stages)
    before = engine.model()[2][0].weight.clone()
    for _ in engine.run(make_batches(3, 3)):
        pass
    assert not torch.equal(engine.model()[2][0].weight, before)
