"""Equivalence of a placement with one device; its command is tested in `tests/cli/test_cli_verify.py`."""

from __future__ import annotations

import math

import torch

from cdp_repro.config.compose import compose_config
from cdp_repro.predict.cutting import cut_model
from cdp_repro.training import comparing
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
