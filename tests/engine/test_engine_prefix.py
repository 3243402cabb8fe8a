"""Sequences cut along their tokens: exact gradients, on ranks bitwise what one device computes, bytes as simulated."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, flat, outcome, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.models import ModelSpec, build_model, cut
from cdp_repro.models.causal import CausalLayer
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program

CONTEXT, SYMBOLS = 12, 11


def stages_of(count, dropout=0.0):
    model = build_model(
        "gpt", ModelSpec(input_shape=(CONTEXT,), classes=SYMBOLS, depth=2, dropout=dropout, width=8, heads=2), seed=0
    ).double()
    ends = [4 * number // count for number in range(count + 1)]
    return list(cut(model, [range(*each) for each in pairwise(ends)]))


def loss_of(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def batches_of(number, sequences=8, context=CONTEXT):
    draw = torch.Generator().manual_seed(1)
    shape = sequences, context
    return [tuple(torch.randint(SYMBOLS, shape, generator=draw) for _ in range(2)) for _ in range(number)]


def engine_of(mode="terapipe", stages=None, placement="single_device", *, n=2, s=2, dropout=0.0, **choices):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    stages = stages or stages_of(s, dropout)
    return Engine(stages, loss_of, optimizer, mode, placement, workers=n, seed=3, **choices)


def losses_of(engine, batches):
    return [result.losses for result in engine.run(batches)]


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 12])
@pytest.mark.parametrize(("s", "choices"), [(1, {}), (2, {"accumulate": 2}), (4, {"replicas": 2})])
def test_slices_compute_what_whole_sequences_do(slices, s, choices):
    whole, cut_up = engine_of("dp", s=s, **choices), engine_of(s=s, slices=slices, **choices)
    for batch in batches_of(4):  # a drain after each
        expected, found = losses_of(whole, [batch]), losses_of(cut_up, [batch])
        mean = torch.tensor(found[0], dtype=torch.float64).view(-1, slices).mean(1)
        torch.testing.assert_close(mean, torch.tensor(expected[0], dtype=torch.float64), rtol=0, atol=1e-12)
        for mine, theirs in zip(cut_up.model().parameters(), whole.model().parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


ON_RANKS = (
    {"n": 2, "s": 2, "slices": 3},
    {"n": 3, "s": 4, "ranks": 2, "slices": 2, "accumulate": 2},
    {"n": 1, "s": 2, "ranks": 2, "slices": 4, "slot_order": "backward_first"},
)


def trained(placement, case):
    engine = engine_of(placement=placement, dropout=0.3, **case)
    micro = 2 * engine.schedule.sizes.sample_parts
    batches = batches_of(5, micro)
    return outcome(engine, [*losses_of(engine, batches[:3]), *losses_of(engine, batches[3:])])


def trained_on_ranks(cases):
    return [trained("pipeline", case) for case in cases]


def check_on_one_device(found, cases):
    for number, case in enumerate(cases):
        choices = {key: value for key, value in case.items() if key != "ranks"}
        check_same([each[number] for each in found], trained("single_device", choices))


def test_two_ranks_compute_bitwise_what_one_device_does(tmp_path):
    check_on_one_device(run_ranks(trained_on_ranks, 2, ON_RANKS, folder=tmp_path), ON_RANKS)


def test_replicas_of_a_pipeline_do_too(tmp_path):
    cases = [{"n": 1, "s": 2, "ranks": 2, "slices": 2, "replicas": 2}]
    check_on_one_device(run_ranks(trained_on_ranks, 4, cases, folder=tmp_path), cases)


def test_a_run_goes_on_bitwise_from_a_checkpoint():
    batches = batches_of(4)
    whole = engine_of(slices=3, dropout=0.3)
    losses = [*losses_of(whole, batches[:2]), *losses_of(whole, batches[2:])]
    first = engine_of(slices=3, dropout=0.3)
    begun = losses_of(first, batches[:2])
    second = engine_of(slices=3, dropout=0.3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [*begun, *losses_of(second, batches[2:])] == losses
    same(flat(second.state_dict()), flat(whole.state_dict()))


@pytest.mark.parametrize("slices", [2, 3, 4, 6])
def test_bytes_are_those_simulated_and_grow_with_the_tokens_before(slices):
    stages = stages_of(2)
    sample = torch.zeros(4, CONTEXT // slices, dtype=torch.long)
    costs = profile_stages(Network(stages, loss_of), sample, sample, slices=slices)
    assert costs == profile_stages(Network(stages, loss_of), sample, sample, slices=slices, execute=True)
    keys_and_values = 2 * sample.numel() * 8 * 8  # of one attention of width 8 in float64
    masks = 8 * (CONTEXT // slices) ** 2
    assert all(keys_and_values <= each <= keys_and_values + 2 * masks for each in costs.prefix_bytes)
    engine = engine_of(stages=stages, slices=slices, traced_steps=3)
    losses_of(engine, batches_of(3))
    simulated = simulate(Program(engine.schedule), costs, 3)
    assert [r.activation_peak_bytes for r in engine.trace().records] == [
        r.activation_peak_bytes for r in simulated.records
    ]


class Checkpointed(nn.Module):
    """A stage whose backward runs its forward again."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, inputs):
        return checkpoint(self.stage, inputs, use_reentrant=False)


def test_what_a_checkpointed_stage_runs_again_knows_the_tokens_before():
    plain, again = engine_of(slices=3), engine_of(stages=[Checkpointed(stage) for stage in stages_of(2)], slices=3)
    assert losses_of(plain, batches_of(2)) == losses_of(again, batches_of(2))
    for mine, theirs in zip(again.model().parameters(), plain.model().parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Counting(CausalLayer):
    """Adds the mean of all tokens so far: a user's layer, which keeps their sum."""

    def forward(self, inputs):
        sums = inputs.cumsum(1)
        if self.keeps:
            sums = sums if self.past is None else sums + self.past[:, None]
            self.present = sums[:, -1]
        counts = torch.arange(self.start + 1, self.start + 1 + inputs.shape[1])
        return inputs + sums / counts[:, None]


def counting_stages():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Embedding(SYMBOLS, 6), Counting()), nn.Sequential(Counting(), nn.Linear(6, SYMBOLS))]


def test_a_layer_of_the_users_is_cut_as_well():
    whole = engine_of("dp", [stage.double() for stage in counting_stages()])
    cut_up = engine_of("terapipe", [stage.double() for stage in counting_stages()], slices=4)
    losses_of(whole, batches_of(3)), losses_of(cut_up, batches_of(3))
    for mine, theirs in zip(cut_up.model().parameters(), whole.model().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_what_has_no_tokens_or_looks_ahead_is_refused():
    plain = [nn.Sequential(nn.Embedding(SYMBOLS, 6), nn.Linear(6, SYMBOLS))]
    with pytest.raises(ValueError, match=r"slices=2 cut sequences, .* none of the layers is a CausalLayer: derive"):
        engine_of(stages=plain)
    with pytest.raises(ValueError, match=r"slices=5 cut sequences, .* not a tensor \[4, 12\]: give 10 tokens"):
        losses_of(engine_of(slices=5), batches_of(1))
