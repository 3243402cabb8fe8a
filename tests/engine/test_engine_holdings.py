"""Ranks that hold the same stage begin with the same parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import make_batches, make_engine
from torch import nn

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def own_stages(count, kind, differ):
    """Stages with a parameter more; if they `differ`, a last bit of that of stage 1 is another on rank 1."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5, dtype=torch.float64)) for _ in range(count)]
    for number, stage in enumerate(stages):
        values = torch.arange(1, 4).to(kind)
        if differ and number == 1 and dist.get_rank():
            values[1] *= 1 + torch.finfo(kind).eps
        stage.register_parameter("extra", nn.Parameter(values))
    return stages


def train(placement, kind, differ):
    engine = make_engine("cdp_v2", placement, 2, 2, lambda count: own_stages(count, kind, differ))
    return [result.losses for result in engine.run(make_batches(2, engine.schedule.micro_batches))]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_hold_a_stage_with_other_parameters_are_refused(tmp_path, kind):
    run_ranks(train, 2, "replicated", kind, False, folder=tmp_path)
    with pytest.raises(AssertionError, match=r"rank 1 has other parameters of stage 1 than rank 0.*manual_seed"):
        run_ranks(train, 2, "replicated", kind, True, folder=tmp_path)


def test_parameters_that_only_one_rank_holds_may_differ_before_the_others_drop_them(tmp_path):
    run_ranks(train, 2, "pipeline", torch.float32, True, folder=tmp_path)
