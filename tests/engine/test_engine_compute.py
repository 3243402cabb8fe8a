"""What a forward of a stage must not do, as it would change what other micro-batches read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import make_batches, make_engine
from torch import nn


class Normalised(nn.Module):
    """Normalises its weight in each forward, as a copy or in place."""

    def __init__(self, in_place):
        super().__init__()
        self.weight, self.in_place = nn.Parameter(torch.randn(5, 5, dtype=torch.float64)), in_place

    def forward(self, x):
        if self.in_place:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return torch.tanh(F.linear(x, F.normalize(self.weight, dim=1)))


class MakesABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.register_buffer("mean", None)

    def forward(self, x):
        self.mean = x.mean(0).detach()
        return self.linear(x)


def train(make, mode="cdp_v2"):
    engine = make_engine(mode, "single_device", 2, 2, lambda count: [make() for _ in range(count)])
    return [result.losses for result in engine.run(make_batches(3, 2))]


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
def test_a_forward_that_changes_its_parameters_is_refused(mode):
    assert len(train(lambda: Normalised(in_place=False), mode)) == 3
    with pytest.raises(ValueError, match=r"changes its parameter weight in a forward.*register_step_post_hook"):
        train(lambda: Normalised(in_place=True), mode)


def test_so_is_an_embedding_that_bounds_its_norms():
    stages = [nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 5)]
    engine = make_engine("cdp_v2", "single_device", 1, 2, lambda _: stages)
    with pytest.raises(ValueError, match=r"changes its parameter weight in a forward, as Embedding\(max_norm"):
        next(engine.run([(torch.arange(6), torch.arange(6) % 5)]))


class ChangesItsBuffer(nn.Linear):
    def __init__(self, change):
        super().__init__(5, 5, dtype=torch.float64)
        self.change = change
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        if self.change is None:
            del self.seen
        else:
            self.seen = self.change(self.seen)
        return super().forward(x)


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (lambda seen: seen + 0.5, r"torch.float32 \[2\]"),
        (lambda seen: torch.cat([seen, seen]), r"torch.int64 \[4\]"),
        (lambda _: None, "None"),
        (None, "None"),
    ],
)
def test_so_is_one_that_makes_another_kind_of_buffer_of_its_own(change, made):
    with pytest.raises(ValueError, match=rf"makes its buffer seen {made} in a forward, which was torch.int64 \[2\]"):
        train(lambda: ChangesItsBuffer(change))
    assert len(train(lambda: ChangesItsBuffer(lambda seen: seen + 1))) == 3


def test_so_is_one_that_makes_a_buffer():
    with pytest.raises(ValueError, match=r"makes its buffer mean in a forward.*register it with its values in __init"):
        train(MakesABuffer)
