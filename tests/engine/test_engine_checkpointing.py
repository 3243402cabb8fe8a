"""Activation checkpointing inside a stage changes no number: its recomputation sees the version of its forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import MODES, PLACEMENTS, check_same, flat, make_batches, make_engine, ranks_of, same, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from cdp_repro import Engine

FOUR_STAGES = (2, 4)  # N, S


class Checkpointed(nn.Module):
    """A part of a network whose activations are recomputed, or kept if `recompute` is False."""

    def __init__(self, *parts, recompute=True, use_reentrant=False):
        super().__init__()
        self.inner = nn.Sequential(*parts)
        self.recompute, self.use_reentrant = recompute, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant) if self.recompute else self.inner(x)


class Masked(nn.Module):
    """Reads one buffer that stays and replaces one that counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0], dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.mask + self.calls


def stages(count, recompute):
    """BatchNorm, dropout, buffers, a whole stage that is recomputed and one of which a part is."""
    torch.manual_seed(0)
    kinds = [
        lambda: Checkpointed(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), recompute=recompute),
        lambda: nn.Sequential(nn.Linear(5, 5), Checkpointed(nn.Dropout(0.3), nn.Linear(5, 5), recompute=recompute)),
        lambda: Checkpointed(Masked(), nn.Tanh(), recompute=recompute),
        lambda: nn.Sequential(Checkpointed(nn.Linear(5, 5), nn.BatchNorm1d(5), recompute=recompute), nn.Linear(5, 5)),
    ]
    return [kinds[number % 4]().double() for number in range(count)]


def recomputing(count):
    return stages(count, recompute=True)


def keeping(count):
    return stages(count, recompute=False)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_on_one_device_it_changes_no_number(mode, accumulate):
    with_it, without = (
        train(mode, "single_device", *FOUR_STAGES, stages=each, accumulate=accumulate, traced_steps=2)
        for each in (recomputing, keeping)
    )
    check_same([with_it], without)


def train_modes(placement, traced_steps):
    """Runs on every rank: one engine after the other."""
    found = []
    for mode in ("dp", "cdp_v1", "cdp_v2"):
        found.append(train(mode, placement, 2, 2, stages=recomputing, traced_steps=traced_steps))
    return found


@pytest.mark.parametrize(("placement", "traced_steps"), [*((each, 0) for each in PLACEMENTS[:2]), ("pipeline", 2)])
def test_on_two_ranks_it_changes_no_number(placement, traced_steps, tmp_path):
    assert ranks_of("cdp_v2", placement, 2, 2) == 2
    on_ranks = run_ranks(train_modes, 2, placement, traced_steps, folder=tmp_path)
    for number, mode in enumerate(("dp", "cdp_v1", "cdp_v2")):
        check_same([each[number] for each in on_ranks], train(mode, "single_device", 2, 2, stages=keeping))


def train_on_stage_groups():
    return train("cdp_v2", "model_parallel", 2, 2, stages=recomputing)


def test_on_model_parallel_it_changes_no_number(tmp_path):
    ranks = ranks_of("cdp_v2", "model_parallel", 2, 2)
    on_ranks = run_ranks(train_on_stage_groups, ranks, folder=tmp_path)
    check_same(on_ranks, train("cdp_v2", "single_device", 2, 2, stages=keeping))


def train_sharded():
    return train("dp", "zero", 2, 2, stages=recomputing, collectives=True)


def test_with_shards_it_changes_no_number_but_the_order_of_a_sum_of_two(tmp_path):
    on_ranks = run_ranks(train_sharded, 2, folder=tmp_path)
    check_same(on_ranks, train("dp", "single_device", 2, 2, stages=keeping))


def test_fewer_activations_are_alive():
    def peak(each):
        engine = make_engine("cdp_v2", "single_device", *FOUR_STAGES, stages=each, traced_steps=3)
        list(engine.run(make_batches(3, engine.schedule.micro_batches)))
        return engine.trace().activation_peak_bytes_total

    assert peak(recomputing) < peak(keeping)


def test_running_statistics_are_updated_once_a_micro_batch():
    engine = make_engine("cdp_v2", "single_device", *FOUR_STAGES, stages=recomputing)
    list(engine.run(make_batches(3, engine.schedule.micro_batches)))
    buffers = flat([stage["buffers"] for stage in engine.state_dict()["stages"]])
    counts = {name: value.item() for name, value in buffers.items() if name.endswith(("num_batches_tracked", "calls"))}
    assert len(counts) == 2 * 3  # two workers, three stages that count
    assert set(counts.values()) == {3.0}


class FirstLinear(nn.Module):
    """Takes the data, which needs no gradient: reentrant checkpointing then makes no graph at all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return checkpoint(lambda y: F.linear(y, self.linear.weight, self.linear.bias), x, use_reentrant=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [FirstLinear(), nn.Linear(5, 5)],
        lambda: [nn.Linear(5, 5), Checkpointed(nn.Linear(5, 5), use_reentrant=True)],
        lambda: [nn.Sequential(nn.Linear(5, 5), Checkpointed(nn.Linear(5, 5), use_reentrant=True))],
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpointing_is_refused_before_anything_is_updated(make):
    parts = [part.double() for part in make()]
    before = {name: tensor.clone() for name, tensor in nn.ModuleList(parts).state_dict().items()}
    engine = Engine(parts, F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), "cdp_v2")
    with pytest.raises(ValueError, match=r"use_reentrant=True.*\(\.\.\., use_reentrant=False\)"):
        list(engine.run(make_batches(2, engine.schedule.micro_batches)))
    same(dict(nn.ModuleList(parts).state_dict()), before)


class CountsCalls(nn.Module):
    """Has a parameter that the loss does not depend on, and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.norm, self.dropout = nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.norm(self.linear(x)))


def test_the_search_for_it_in_a_stage_with_unused_parameters_leaves_no_trace():
    def without_unused():
        stage = CountsCalls().double()
        stage.unused.requires_grad_(False)
        return stage

    def run(make):
        torch.manual_seed(0)
        engine = Engine([make()], F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), "dp", seed=1)
        losses = [result.losses for result in engine.run(make_batches(2, 1))]
        return losses, dict(engine.model().state_dict())

    (losses, state), (expected_losses, expected) = run(lambda: CountsCalls().double()), run(without_unused)
    assert losses == expected_losses
    same(state, expected)
