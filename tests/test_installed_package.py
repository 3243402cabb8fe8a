"""A package of the user's that enters a model, a data set, a timeline and a mode: commands and all ranks find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY_POINTS = """
[cdp_repro.models]
my_net = my_package:build
my_whole_net = my_package:whole
my_wrong_net = my_package:wrong
[cdp_repro.datasets]
my_data = my_package:load
[cdp_repro.timelines]
slow = my_package:Slow
[cdp_repro.placements]
reversed = my_package:Reversed
[cdp_repro.modes]
slow = my_package:SLOW
half = my_package:HALF
broken = my_package:missing
"""

CODE = """
from collections import OrderedDict

import torch
from torch import nn

from cdp_repro.data.in_memory import InMemoryDataset, Split
from cdp_repro.schedule import Mode, Placement, Rule, UniformDelay
from cdp_repro.schedule.timelines.cyclic import Cyclic


class Slow(Cyclic):
    name = "slow"


SLOW = Mode("slow", UniformDelay)


class HalfStale(Rule):
    def staleness(self, i, j):
        return 0.5


HALF = Mode("slow", HalfStale)


class Reversed(Placement):
    name = "reversed"

    def holders(self, stage):
        last = self.timeline.sizes.stages - 1
        return range(last - stage, last - stage + 1)


def build(spec):
    channels, height, width = spec.input_shape
    return nn.Sequential(OrderedDict(
        first=nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, spec.hidden)),
        second=nn.Sequential(nn.ReLU(), nn.Linear(spec.hidden, spec.classes)),
    ))


def whole(spec):
    return nn.Linear(2, 2)


def wrong(spec):
    first, second = build(spec)
    return nn.Sequential(first, nn.Linear(spec.hidden + 1, spec.classes))


def load(root):
    images = torch.arange(48 * 2 * 9).reshape(48, 2, 3, 3).remainder(256).to(torch.uint8)
    split = Split(images, torch.arange(48) % 4)
    return InMemoryDataset(
        name="my_data", description=f"stripes from {root}", classes=4, train=split, test=split,
        statistics=((0.5, 0.5), (0.2, 0.2)), augmentation=None,
    )
"""

RUN = (
    "model=my_net", "model.hidden=5", "mode=slow", "dataset=my_data", "dataset.channels=2", "dataset.image_size=3",
    "dataset.classes=4", "dataset.root=here", "workers=2", "batch_size=16",
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package and what an installer writes beside it."""
    info = tmp_path / "site" / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info.parent / "my_package.py").write_text(CODE)
    return info.parent


def run(site: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", f"cdp_repro.cli.{command}", *arguments], cwd=site.parent, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip


def test_it_is_trained_on_ranks_exported_and_verified(site):
    settings = (*RUN, "placement=replicated", "epochs=1", "wandb=disabled", "run_dir=mine")
    done = run(site, "train", *settings)
    assert done.returncode == 0, done.stderr
    summary = json.loads((site.parent / "mine" / "summary.json").read_text())
    assert (summary["ranks"], summary["ledger/reads"], summary["memory/versions_kept"]) == (2, 3 * 2 * 2 * 2, 2)
    assert "my_net on stripes from here, slow, N = 2 workers" in done.stderr
    exported = run(site, "export", "mine", "mine.safetensors")
    assert f"{18 * 5 + 5 + 5 * 4 + 4} numbers in 4 tensors" in exported.stdout
    assert "they agree bitwise" in run(site, "verify", *RUN, "placement=pipeline").stdout


def test_a_placement_is_planned_priced_and_trained_although_data_parallelism_cannot_run_on_it(site):
    here = (*RUN, "placement=reversed")
    planned = run(site, "plan", *here, "--html=plan.html")
    assert "\ndp is on single_device: it cannot run on placement=reversed\n" in planned.stdout, planned.stderr
    assert (site.parent / "plan.html").stat().st_size > 10_000
    seconds = (f"cluster.{name}_seconds=[1,1]" for name in ("forward", "backward"))
    priced = run(site, "plan", *here, "price=true", *seconds)
    where = [line.split()[:2] for line in priced.stdout.splitlines()]
    assert ["slow", "reversed"] in where and ["dp", "replicated"] in where, priced.stderr
    assert ["dp", "reversed"] not in where
    compared = run(site, "plan", "--systems", *here)
    assert ["slow", "reversed"] in [line.split()[:2] for line in compared.stdout.splitlines()], compared.stderr
    done = run(site, "train", *here, "epochs=1", "wandb=disabled", "run_dir=mine")
    assert done.returncode == 0, done.stderr
    assert "data parallelism" in done.stdout
    assert json.loads((site.parent / "mine" / "summary.json").read_text())["status"] == "finished"


def test_a_plan_names_what_is_missing_and_what_cannot_be_imported(site):
    planned = run(site, "plan", *RUN)
    assert "timeline of slow" in planned.stdout, planned.stderr
    unsized = run(site, "plan", "dataset=my_data")
    assert (unsized.returncode, "dataset.classes has no value yet: give one" in unsized.stderr) == (2, True)
    broken = run(site, "plan", "mode=broken")
    assert broken.returncode == 2
    assert "cdp_repro.modes 'broken', which an installed package has entered as my_package:missing" in broken.stderr
    assert "AttributeError" in broken.stderr and "Traceback" not in broken.stderr
    misspelt = run(site, "plan", "mode=slwo", "model=my_nett")
    assert misspelt.stderr.count("did you mean 'slow'?") == misspelt.stderr.count("did you mean 'my_net'?") == 1


def test_a_rule_that_gives_no_numbers_is_told(site):
    planned = run(site, "plan", *RUN, "mode=half")
    assert planned.returncode == 2 and "Traceback" not in planned.stderr
    assert "error: HalfStale: staleness(0, 0) is 0.5: give a whole number, at least 0" in planned.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("my_whole_net", "model my_whole_net is a Linear: give an nn.Sequential of its blocks, to cut it"),
        ("my_wrong_net", "cannot train on a micro-batch of 8: part 1 of 2 (Linear) cannot be run: "),
    ],
)
def test_what_is_wrong_with_a_model_is_told(site, model, said):
    planned = run(site, "plan", *RUN, f"model={model}")
    assert planned.returncode == 2 and said in planned.stderr and "Traceback" not in planned.stderr
