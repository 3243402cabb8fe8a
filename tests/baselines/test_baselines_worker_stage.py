"""The optimizer of a stage that a library trains."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from cdp_repro.baselines.worker_stage import StageOptimizer


def test_a_scalar_of_the_optimizer_keeps_its_type_over_a_checkpoint():
    """NAdam's `mu_product` is fp32; as torch loads it, it would go on in the parameters' fp64 and give other steps."""

    def trained(steps, state=None):
        torch.manual_seed(0)
        stage = nn.Linear(3, 2).double()
        optimizer = StageOptimizer(stage, partial(torch.optim.NAdam, lr=0.1))
        if state is not None:
            stage.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for step in steps:
            for parameter in stage.parameters():
                parameter.grad = torch.full_like(parameter, 0.3 + step)
            optimizer.update(1.0)
        return {name: value.clone() for name, value in stage.state_dict().items()}, optimizer.state_dict()

    whole, _ = trained(range(6))
    resumed, _ = trained(range(3, 6), trained(range(3)))
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
