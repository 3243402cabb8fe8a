"""Ranks that hold the same stage begin with the same parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import make_batches, make_engine
from torch import nn

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def leave(stage):
    pass


def raise_a_last_bit(stage):
    stage.extra.data[1] *= 1 + torch.finfo(stage.extra.dtype).eps


def swap(stage):
    stage.extra.data, stage.further.data = stage.further.data, stage.extra.data


def own_stages(count, kind, change):
    """Stages with two parameters more; on rank 1, `change` is done to stage 1."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5, dtype=torch.float64)) for _ in range(count)]
    for number, stage in enumerate(stages):
        stage.register_parameter("extra", nn.Parameter(torch.arange(1, 4).to(kind)))
        stage.register_parameter("further", nn.Parameter(torch.arange(2, 5).to(kind)))
        if number == 1 and dist.get_rank():
            change(stage)
    return stages


def train(placement, kind, change):
    engine = make_engine("cdp_v2", placement, 2, 2, lambda count: own_stages(count, kind, change))
    return [result.losses for result in engine.run(make_batches(2, engine.schedule.micro_batches))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [raise_a_last_bit, swap])
def test_ranks_that_hold_a_stage_with_other_parameters_are_refused(tmp_path, kind, change):
    refusal = r"rank 1 has other parameters of stage 1 than rank 0, such as extra.*manual_seed"
    with pytest.raises(AssertionError, match=refusal):
        run_ranks(train, 2, "replicated", kind, change, folder=tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_the_same_parameters_train(tmp_path, kind):
    run_ranks(train, 2, "replicated", kind, leave, folder=tmp_path)


def test_parameters_that_only_one_rank_holds_may_differ_before_the_others_drop_them(tmp_path):
    run_ranks(train, 2, "pipeline", torch.float32, raise_a_last_bit, folder=tmp_path)
