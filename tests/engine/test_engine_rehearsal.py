"""A rehearsal finds shapes and costs, and leaves the network as it is."""

from __future__ import annotations

import threading
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, make_batches, train
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.engine.rehearsal import Rehearsal, fake_tensors


class KeepsATable(nn.Module):
    """Keeps the table that its first forward makes, in an attribute or in a dict; counts its forwards in a buffer."""

    def __init__(self, kept_in):
        super().__init__()
        self.linear, self.kept_in = nn.Linear(5, 5, dtype=torch.float64), kept_in
        self.tables, self.table = {}, None
        self.register_buffer("forwards", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.forwards = self.forwards + 1
        table = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        if self.kept_in == "an attribute":
            self.table = table if self.table is None else self.table
            table = self.table
        else:
            table = self.tables.setdefault(x.shape, table)
        return torch.tanh(self.linear(x) + table)


def train_stages_that_keep(placement, kept_in):
    torch.manual_seed(0)
    return train("cdp_v2", placement, 2, 2, stages=lambda count: [KeepsATable(kept_in) for _ in range(count)])


@pytest.mark.parametrize("kept_in", ["an attribute", "a dict"])
@pytest.mark.parametrize("placement", ["replicated", "zero", "pipeline"])
def test_what_a_stage_makes_in_its_first_forward_has_values(tmp_path, placement, kept_in):
    alone = train_stages_that_keep("single_device", kept_in)
    ranks = run_ranks(train_stages_that_keep, 2, placement, kept_in, folder=tmp_path)
    check_same(ranks, alone)


def test_a_rehearsal_copies_no_parameters_and_takes_stages_that_cannot_be_copied():
    stages = [nn.Linear(5, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5))]
    stages[1].lock = threading.Lock()  # refuses to be copied
    for given in (stages[:1], stages):
        with fake_tensors() as convert:
            rehearsal = Rehearsal(Network(given, F.cross_entropy), convert)
        copies = [stage is not own for stage, own in zip(rehearsal.stages, given, strict=True)]
        assert copies == [len(given) == 1] * len(given)
        assert all(
            mine is theirs
            for stage, own in zip(rehearsal.stages, given, strict=True)
            for mine, theirs in zip(stage.parameters(), own.parameters(), strict=True)
        )


@lru_cache
def table(width):
    return torch.linspace(0, 1, width, dtype=torch.float64)


class UsesACache(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x) + table(x.shape[-1]))


def train_with_a_cache(placement):
    table.cache_clear()
    return train("cdp_v2", placement, 2, 2, stages=lambda count: [UsesACache() for _ in range(count)])


def test_what_stays_in_a_cache_outside_of_the_stage_is_refused(tmp_path):
    train_with_a_cache("single_device")
    with pytest.raises(AssertionError, match=r"tensor without values.*not in a cache such as lru_cache"):
        run_ranks(train_with_a_cache, 2, "pipeline", folder=tmp_path)


def masked(output, targets):
    kept = targets != 0
    return F.cross_entropy(output[kept], targets[kept])


def train_what_needs_values(what, placement):
    """Return what a hook has seen."""
    stages, means = [nn.Linear(5, 5, dtype=torch.float64) for _ in range(2)], []
    if what == "a hook":
        stages[1].register_forward_hook(lambda module, inputs, output: means.append(output.abs().mean().item()))
    loss_fn = masked if what == "a mask" else F.cross_entropy
    engine = Engine(stages, loss_fn, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "cdp_v2", placement)
    assert len([*engine.run(make_batches(3, 2))]) == 3
    return means


@pytest.mark.parametrize("what", ["a hook", "a mask"])
def test_what_needs_values_is_refused_where_a_forward_without_values_finds_the_layouts(tmp_path, what):
    assert len(train_what_needs_values(what, "single_device")) == (6 if what == "a hook" else 0), "once a micro-batch"
    with pytest.raises(AssertionError, match=r"part 1 of 2 \(Linear\) reads a value of a tensor, itself, in a hook or"):
        run_ranks(train_what_needs_values, 2, what, "replicated", folder=tmp_path)
