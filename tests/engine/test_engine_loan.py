"""Parameters that a backward reads again are those that the forward has used, whatever view of them it has taken."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from small_runs import check_same, train
from torch import nn


class OfAView(nn.Module):
    """Saves a lazy view of its complex parameter for the backward: its conjugate, or the imaginary part of that."""

    def __init__(self, view):
        super().__init__()
        self.weight, self.view = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128)), view

    def forward(self, x):
        conjugate = self.weight.conj()
        if self.view == "conjugate":
            return torch.tanh((x.to(conjugate.dtype) @ conjugate @ conjugate.T).real)
        negated = conjugate.imag
        assert negated.is_neg()
        return torch.tanh(x @ negated @ negated.T)


class Prompt(nn.Module):
    """Its output is a view of its parameter: what the next stage reads must outlast the parameter."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return self.prompt.expand(len(x), 5)


def train_prompt(mode, placement):
    torch.manual_seed(0)
    stages = [Prompt(), nn.Linear(5, 5).double(), nn.Linear(5, 5).double()]
    return train(mode, placement, 3, 3, stages=lambda _: stages)


@pytest.mark.parametrize(("mode", "placement"), [("cdp_v2", "zero"), ("ampnet", "pipeline")])
def test_an_output_that_is_a_view_of_a_parameter_outlasts_it(tmp_path, mode, placement):
    alone = train_prompt(mode, "single_device")
    check_same(run_ranks(train_prompt, 3, mode, placement, folder=tmp_path), alone)


def train_views(placement, mode, view):
    torch.manual_seed(0)
    return train(mode, placement, 2, 2, stages=lambda count: [OfAView(view) for _ in range(count)])


@pytest.mark.parametrize("view", ["conjugate", "negated"])
@pytest.mark.parametrize("mode", ["dp", "cdp_v1"])
def test_a_lazy_view_of_a_parameter_is_the_same_view_when_it_comes_again(tmp_path, mode, view):
    check_same(run_ranks(train_views, 2, "zero", mode, view, folder=tmp_path), train_views("single_device", mode, view))
