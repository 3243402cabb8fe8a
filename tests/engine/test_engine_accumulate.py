"""k micro-batches a worker in a training step: on every placement what one device computes, bitwise."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import run_ranks
from small_runs import MODES, PLACEMENTS, check_same, make_batches, make_engine, outcome, ranks_of, train, train_each

from cdp_repro.schedule import COLLECTIVE_PLACEMENTS


def by_ranks(cases):
    """Group cases by how many ranks they run on, so that each group needs processes once."""
    groups = {}
    for arguments, choices in cases:
        groups.setdefault(ranks_of(*arguments, **choices), []).append((arguments, choices))
    return groups


def check_each(cases, folder):
    for ranks, group in by_ranks(cases).items():
        found = run_ranks(train_each, ranks, group, folder=folder)
        for number, ((mode, _, *sizes), choices) in enumerate(group):
            own = {name: value for name, value in choices.items() if name in ("accumulate", "replicas")}
            check_same([each[number] for each in found], train(mode, "single_device", *sizes, **own))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_computes_what_one_device_computes(tmp_path, placement, n):
    check_each([((mode, placement, n, n), {"accumulate": 2}) for mode in MODES], tmp_path)


@pytest.mark.parametrize("placement", ["replicated", "zero", "pipeline"])
def test_replicas_accumulate_too(tmp_path, placement):
    check_each([((mode, placement, 2, 2), {"accumulate": 2, "replicas": 2}) for mode in ("dp", "cdp_v2")], tmp_path)


def test_more_stages_than_workers_and_three_micro_batches_each(tmp_path):
    check_each([((mode, "replicated", 2, 4), {"accumulate": 3}) for mode in ("dp", "cdp_v1", "cdp_v2")], tmp_path)


@pytest.mark.parametrize("placement", COLLECTIVE_PLACEMENTS)
def test_collectives_differ_by_the_order_of_sums_only(tmp_path, placement):
    found = run_ranks(
        train_each, 3, [(("dp", placement, 3, 3), {"accumulate": 2, "collectives": True})], folder=tmp_path
    )
    losses, model, state, reads = train("dp", "single_device", 3, 3, accumulate=2)
    mine = [each[0] for each in found]
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(torch.tensor(mine[0][0]), torch.tensor(losses), **close)
    for expected, tensors in [(model, each[1]) for each in mine] + [(state, mine[0][2])]:
        assert tensors.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(tensors[name], expected[name], **close)
    assert sum(each[3] for each in mine) == reads


STEPS, STOP, SIZES = 6, 3, (2, 2)


def resumed(mode, placement, start=None):
    """Train to the end from `start`, or from a new engine's state that was saved in mid-run.

    The state goes by way of another engine, so that nothing but the state can be passed on.
    """
    engine = make_engine(mode, placement, *SIZES, accumulate=2)
    batches = make_batches(STEPS, 4)
    if start is None:
        for _ in engine.run(batches[:STOP]):
            pass
        start = engine.team.share(copy.deepcopy(engine.state_dict()))
        engine = make_engine(mode, placement, *SIZES, accumulate=2)
    engine.load_state_dict(copy.deepcopy(start))
    assert engine.step == STOP
    losses = [result.losses for result in engine.run(batches[STOP:])]
    return start, outcome(engine, losses)


def resumed_each(cases):
    return [resumed(*case) for case in cases]


@pytest.mark.parametrize("placement", ["replicated", "zero", "pipeline"])
def test_a_checkpoint_goes_on_bitwise_there_on_one_device_and_from_one_device(tmp_path, placement):
    modes = ("dp", "cdp_v1", "cdp_v2")
    saved_here = {mode: resumed(mode, "single_device")[0] for mode in modes}
    cases = [(mode, placement, start) for mode in modes for start in (None, saved_here[mode])]
    on_ranks = run_ranks(resumed_each, 2, cases, folder=tmp_path)
    for number, (mode, _, start) in enumerate(cases):
        losses, model, state, _ = train(mode, "single_device", *SIZES, pieces=(STEPS,), accumulate=2)
        reads = 2 * (STEPS - STOP) * 4 * 2
        expected = losses[STOP:], model, state, reads
        check_same([each[number][1] for each in on_ranks], expected)
        if start is None:
            check_same([resumed(mode, "single_device", on_ranks[0][number][0])[1]], expected)
