"""Equivalence of a placement with one device; its command is tested in `tests/cli/test_cli_verify.py`."""

from __future__ import annotations

import math

import torch

from cdp_repro.config.compose import compose_config
from cdp_repro.training import equivalence
from cdp_repro.training.equivalence import Outcome, verify


def test_threads_of_one_device_change_nothing(monkeypatch):
    """Kernels cut sums by threads, and ranks have fewer of them than one device."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = compose_config(["dataset=digits", "model=mlp", "model.hidden=17", "workers=2", "batch_size=14",
                             "placement=replicated", "precision=fp64", "device=cpu"])  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert verify(config, steps=2).agrees
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_losses_are_compared_in_double_precision_and_infinities_never_agree(monkeypatch):
    config = compose_config(["dataset=digits", "model=mlp", "workers=2", "batch_size=14", "placement=replicated"])

    def losses(found, expected):
        monkeypatch.setattr(equivalence, "_train", lambda *_: Outcome([[expected]], [{}], [3, 4]))
        monkeypatch.setattr(equivalence, "launch", lambda *_: Outcome([[found]], [{}], [3, 4]))
        return verify(config, steps=2)

    assert losses(1.0, 1.0).agrees
    assert losses(1.0 + 2**-40, 1.0).losses == 2**-40
    assert (
        losses(math.inf, math.inf).losses == math.inf == losses(1.0, math.inf).losses
        and not losses(math.nan, 1.0).agrees
    )
