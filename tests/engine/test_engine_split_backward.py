"""A backward in two parts gives the gradients of one in one part, whatever the graph of the stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import make_batches
from torch import nn

from cdp_repro import Engine


class Front(nn.Module):
    """Changes its input in a way that gradients may or may not pass, before it uses its weight."""

    def __init__(self, front):
        super().__init__()
        self.front, self.linear, self.table = front, nn.Linear(5, 5), nn.Embedding(5, 5)

    def forward(self, x):
        if self.front == "detach":
            return self.linear(x.detach())
        if self.front == "tokens":
            return self.table(x.argmax(-1))
        if self.front == "no_grad":
            with torch.no_grad():
                x = torch.tanh(x)
            return self.linear(x)
        if self.front == "beside":
            return self.linear(x.detach()) + x
        if self.front == "hook":
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: 0.5 * gradient)
            return torch.tanh(y)
        return torch.tanh(self.linear(x))


def trained(mode, fronts):
    torch.manual_seed(0)
    stages = [Front(front).double() for front in fronts]
    engine = Engine(stages, F.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1), mode, workers=2)
    before = [parameter.detach().clone() for parameter in engine.model().parameters()]
    losses = [result.losses for result in engine.run(make_batches(4, 2))]
    return losses, before, [parameter.detach().clone() for parameter in engine.model().parameters()]


@pytest.mark.parametrize("front", ["detach", "tokens", "no_grad", "beside", "hook", ""])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_that_lets_no_gradient_through_is_trained(front, place):
    fronts = [""] * 3
    fronts[place] = front
    (losses, before, after), (expected_losses, _, expected) = trained("zero_bubble", fronts), trained("gpipe", fronts)
    assert losses == expected_losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, expected, strict=True))
    if front == "hook":
        plain = trained("zero_bubble", [""] * 3)
        assert plain[0] != losses, "the hook, which halves gradients, runs"
    used = 3 * place + (2 if front == "tokens" else 0)  # of each stage: weight, bias, table
    assert not torch.equal(before[used], after[used])
