"""Equivalence of a placement with one device; its command is tested in `tests/cli/test_cli_verify.py`."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks

from cdp_repro.config.compose import compose_config
from cdp_repro.predict.cutting import cut_model
from cdp_repro.training import comparing
from cdp_repro.training.assembly import build_engine
from cdp_repro.training.comparing import Outcome, compare


def test_threads_change_nothing():
    """Kernels cut sums by threads, and a rank may have fewer of them than one device."""
    config = compose_config(["dataset=digits", "model=mlp", "model.hidden=17", "workers=2", "batch_size=14",
                             "precision=fp64", "device=cpu"])  # fmt: skip
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(comparing._train(config, 2, cut_model(config)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert one.losses == two.losses
    for mine, theirs in zip(one.stages, two.stages, strict=True):
        assert all(torch.equal(mine[path], theirs[path]) for path in mine | theirs)


def compare_with_another_last_update(config, steps, wrong_step):
    """On rank 1, the update of one step has another learning rate."""

    def build(*arguments):
        engine = build_engine(*arguments)
        if engine.rank == 1 and engine.team.size > 1:
            right = engine._executor._learning_rate_factor
            engine._executor._learning_rate_factor = lambda step: right(step) * (1.5 if step == wrong_step else 1)
        return engine

    comparing.build_engine = build  # this process is a rank, and ends with the test
    found = compare(config, steps)
    return None if found is None else (found.agrees, found.losses, list(found.copies))


@pytest.mark.parametrize(("mode", "steps"), [("cdp_v1", 2), ("cdp_v1", 4), ("cdp_v2", 4)])
def test_an_update_that_no_forward_has_read_is_compared_on_every_rank(tmp_path, mode, steps):
    config = compose_config(["dataset=digits", "model=mlp", "model.depth=2", "workers=2", "batch_size=14",
                             "placement=replicated", "precision=fp64", "device=cpu", "optim.warmup_epochs=0",
                             f"mode={mode}"])  # fmt: skip
    right, _ = run_ranks(compare_with_another_last_update, 2, config, steps, -1, folder=tmp_path, joins=True)
    assert right == (True, 0.0, [])
    wrong, _ = run_ranks(compare_with_another_last_update, 2, config, steps, steps - 1, folder=tmp_path, joins=True)
    agrees, losses, copies = wrong
    assert not agrees and losses == 0.0
    assert f"version {steps} of stage 0 on rank 1" in copies


def test_losses_are_compared_in_double_precision_and_infinities_never_agree(monkeypatch):
    config = compose_config(["dataset=digits", "model=mlp", "workers=2", "batch_size=14", "placement=replicated"])

    def losses(found, expected):
        cut = cut_model(config)
        monkeypatch.setattr(comparing, "_train", lambda *_: Outcome([[expected]], [{}], cut))
        monkeypatch.setattr(comparing, "_train_on_ranks", lambda *_: Outcome([[found]], [{}], cut))
        return compare(config, steps=2)

    assert losses(1.0, 1.0).agrees
    assert losses(1.0 + 2**-40, 1.0).losses == 2**-40
    assert (
        losses(math.inf, math.inf).losses == math.inf == losses(1.0, math.inf).losses
        and not losses(math.nan, 1.0).agrees
    )
