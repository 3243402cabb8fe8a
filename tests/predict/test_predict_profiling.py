"""Profiles from fake tensors are those of real ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdp_repro.config import RunConfig
from cdp_repro.config.schema import DatasetConfig, ModelConfig
from cdp_repro.engine.compute import Network
from cdp_repro.models import ModelSpec, build_model
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.profiling import profile_stages, time_stages


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet18", "deit_tiny_patch16_224"])
def test_fake_tensors_cost_what_real_ones_cost(name):
    blocks = list(build_model(name, ModelSpec(input_shape=(3, 32, 32), classes=10)))
    inputs, targets = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    fake = profile_stages(Network(blocks, F.cross_entropy), inputs, targets)
    assert fake == profile_stages(Network(blocks, F.cross_entropy), inputs, targets, execute=True)
    assert sum(fake.forward_bytes) == sum(fake.backward_bytes) > inputs.nbytes


def test_flops_of_a_linear_layer_are_two_for_a_multiply_add():
    costs = profile_stages(
        Network([nn.Linear(5, 7), nn.Linear(7, 3)], F.cross_entropy),
        torch.randn(4, 5),
        torch.zeros(4, dtype=torch.long),
    )
    assert costs.forward_flops == (2 * 4 * 5 * 7, 2 * 4 * 7 * 3)
    assert costs.backward_flops == (2 * 4 * 5 * 7, 2 * 2 * 4 * 7 * 3)  # the first stage needs no input gradient
    assert costs.parameter_bytes == (4 * (5 * 7 + 7), 4 * (7 * 3 + 3))


def test_profiling_changes_nothing():
    stages = list(build_model("resnet8", ModelSpec(input_shape=(1, 8, 8), classes=10)))
    before = copy.deepcopy(nn.Sequential(*stages).state_dict())
    random_state = torch.get_rng_state()
    inputs, targets = torch.randn(4, 1, 8, 8, generator=torch.Generator()), torch.zeros(4, dtype=torch.long)
    profile_stages(Network(stages, F.cross_entropy), inputs, targets, execute=True)
    assert all(seconds > 0 for seconds in time_stages(Network(stages, F.cross_entropy), inputs, targets, rounds=1))
    after = nn.Sequential(*stages).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("partition", ["flops", "parameters", "activations", "time"])
def test_a_cut_balances_what_it_is_asked_to(partition):
    config = RunConfig(
        dataset=DatasetConfig(channels=3, image_size=32), model=ModelConfig("resnet20"), partition=partition
    )
    cut = cut_model(config)
    assert [len(names) for names in cut.block_names] == [len(stage) for stage in cut.stages]
    assert sum(map(len, cut.block_names)) == 11
    assert 1 <= cut.imbalance < 4
    own = {"parameters": cut.costs.parameter_bytes}.get(partition)
    assert own is None or tuple(cut.balanced) == own


class Sum(nn.Module):
    def forward(self, left, right):
        return left + right


def test_an_input_is_kept_by_the_stage_that_reads_it_not_by_the_one_after_its_maker():
    stages = [nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3), Sum()]
    network = Network(stages, F.cross_entropy, sources=((), (), (0, 1)))
    costs = profile_stages(network, torch.randn(2, 4), torch.zeros(2, dtype=torch.long))
    assert costs.input_kept == (False, False, True)  # only the last takes a gradient
