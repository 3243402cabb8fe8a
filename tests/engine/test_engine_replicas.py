"""Replicas share the samples of a micro-batch: for stages that treat each sample by itself, nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import MATRIX, make_batches, rule
from torch import nn

from cdp_repro import Engine


def plain_stages(count):
    """No BatchNorm and no dropout."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def run(mode, n, k, r, batches):
    engine = Engine(
        plain_stages(n),
        F.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.5),  # by which gradients R times as large show at once
        rule(mode, n, n, k),
        workers=n,
        accumulate=k,
        replicas=r,
    )
    losses = [result.losses for result in engine.run(batches)]
    return torch.tensor(losses), dict(engine.model().named_parameters())


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "accumulation", MATRIX])
@pytest.mark.parametrize(("n", "k", "r"), [(2, 1, 2), (3, 1, 3), (2, 2, 2)])
def test_the_mean_is_over_all_replicas(mode, n, k, r):
    batches = make_batches(4, k * n * r)
    losses, expected = run(mode, n, k, 1, batches)
    shared_losses, shared = run(mode, n, k, r, batches)
    torch.testing.assert_close(shared_losses, losses, rtol=0, atol=1e-6)
    start = dict(nn.Sequential(*plain_stages(n)).named_parameters())
    for name, tensor in expected.items():
        torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-12)
        assert not torch.allclose(tensor, start[name], rtol=0, atol=1e-4), "something was learnt"
