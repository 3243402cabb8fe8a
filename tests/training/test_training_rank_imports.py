"""What ranks import before they are forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cdp_repro.config.compose import compose_config
from cdp_repro.launch import launch
from cdp_repro.training.rank_imports import rank_imports

HEAVY = {"torch", "torch._dynamo", "sympy", "torchvision", "timm", "sklearn", "torch.distributed.tensor"}
"""Packages that take from half a second to two."""


def _imported_by_a_rank(config):
    before = HEAVY & sys.modules.keys()
    from cdp_repro.training.comparing import compare

    compare(config, 2)
    return before, HEAVY & sys.modules.keys()


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["dataset=digits", "model=mlp"], {"sklearn"}),
        (["dataset=synthetic", "dataset.image_size=8", "model=resnet8"], {"torchvision"}),
        (["dataset=synthetic", "dataset.image_size=8", "model=two_towers", "stages=6"], {"torchvision"}),
        (["dataset=synthetic", "model=vit_tiny_patch16_224", "dataset.image_size=32"], {"timm"}),
        (["dataset=text", "model=gpt", "optim=adamw"], set()),
        (["dataset=digits", "model=mlp", "mode=dp", "baseline=fsdp2"], {"torch.distributed.tensor"}),
    ],
)
def test_a_rank_imports_nothing_large_once_it_is_forked(overrides, needed):
    small = ["workers=2", "batch_size=4", "wandb=disabled", "device=cpu"]
    if not any("baseline=" in each for each in overrides):
        small.append("placement=replicated")
    config = compose_config([*overrides, *small])
    before, after = launch(_imported_by_a_rank, [config], 2, imports=rank_imports(config))
    assert before == after
    assert {"torch", "torch._dynamo", *needed} <= before


def test_a_run_imports_only_what_it_needs():
    """Beside torch and its compiler, which torch's own optimizers import: an MLP needs no library of networks."""
    code = "import sys, cdp_repro.training.run; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY & {*said.stdout.split()} == {"torch"}
