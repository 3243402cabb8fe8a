"""Clipping by the norm of the mean gradient; what concerns methods against delay too is in `test_engine_delay.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, flat, make_batches, make_engine, same, train, train_each
from torch import nn

from cdp_repro import Engine


def test_sums_that_the_second_part_of_a_backward_completes_are_clipped():
    """`zero_bubble` clips by the same norm as `gpipe`, of which it is another order."""
    batches = make_batches(3, 2)
    parallel, split = (make_engine(mode, "single_device", 2, 2, clip_norm=0.01) for mode in ("gpipe", "zero_bubble"))
    losses = [[result.losses for result in engine.run(batches)] for engine in (parallel, split)]
    assert losses[0] == losses[1]
    same(flat(parallel.state_dict()), flat(split.state_dict()))


def test_ranks_tell_each_other_what_those_parts_complete(tmp_path):
    case, choices = ("zero_bubble", "pipeline", 2, 2, (2, 1)), {"clip_norm": 0.01}
    found = run_ranks(train_each, 2, [(case, choices)], folder=tmp_path)
    check_same([each[0] for each in found], train("zero_bubble", "single_device", *case[2:], **choices))


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_norm_that_is_no_bound_is_refused(limit):
    with pytest.raises(ValueError, match="use a finite number above 0"):
        make_engine("dp", "single_device", 2, 2, clip_norm=limit)


def test_a_server_alone_knows_the_norm_and_workers_without_a_stage_wait_for_none(tmp_path):
    """Ranks that hold no stage would never receive what those that update tell each other: eight steps are enough."""
    case, choices = ("dp", "parameter_server", 2, 2, (6, 4)), {"clip_norm": 0.01}
    found = run_ranks(train_each, 3, [(case, choices)], folder=tmp_path)
    check_same([each[0] for each in found], train("dp", "single_device", *case[2:], **choices))


def test_complex_gradients_count_with_both_parts():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex128))

        def forward(self, x):
            both = x.to(self.weight.dtype) @ self.weight
            return torch.cat([both.real, both.imag], 1)

    torch.manual_seed(0)
    stages = [Complex(), nn.Linear(8, 5).double()]
    before = [each.detach().clone() for stage in stages for each in stage.parameters()]
    engine = Engine(stages, F.cross_entropy, lambda params: torch.optim.SGD(params, lr=1.0), "dp", clip_norm=0.1)
    list(engine.run(make_batches(1, 2)))
    moved = [each.detach() for stage in stages for each in stage.parameters()]
    squares = [(old - new).abs().square().sum() for old, new in zip(before, moved, strict=True)]
    assert sum(squares).sqrt().item() == pytest.approx(0.1, rel=1e-4)
