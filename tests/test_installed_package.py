"""A package of the user's that enters a model, a data set, a timeline and a mode: commands and all ranks find them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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


def run(site: Path, command: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command, or with None a program given as text."""
    start = ["-c"] if command is None else ["-m", f"cdp_repro.cli.{command}"]
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=site.parent, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip


PLANS = """
import json, sys
from cdp_repro.cli.plan import main
from cdp_repro.cli.streams import write_error, write_out
for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    for write in (write_out, write_error):
        write(f"\\n=== {code}\\n")
"""


def plans(site: Path, *runs: Sequence[str]) -> list[tuple[int, str, str]]:
    """Return code, output and errors of each of several plans, made in one process: to start one takes seconds."""
    done = run(site, None, PLANS, json.dumps(runs))
    outputs, errors = (re.split(r"\n=== (\d)\n", text)[:-1] for text in (done.stdout, done.stderr))
    assert len(outputs) == len(errors) == 2 * len(runs), done.stderr
    return [(int(code), out, error) for out, code, error in zip(outputs[::2], outputs[1::2], errors[::2], strict=True)]


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
    seconds = (f"cluster.{name}_seconds=[1,1]" for name in ("forward", "backward"))
    planned, priced, compared = plans(
        site, [*here, "--html=plan.html"], [*here, "price=true", *seconds], ["--systems", *here]
    )
    assert "\ndp is on single_device: it cannot run on placement=reversed\n" in planned[1], planned
    assert (site.parent / "plan.html").stat().st_size > 10_000
    where = [line.split()[:2] for line in priced[1].splitlines()]
    assert ["slow", "reversed"] in where and ["dp", "replicated"] in where, priced
    assert ["dp", "reversed"] not in where
    assert ["slow", "reversed"] in [line.split()[:2] for line in compared[1].splitlines()], compared
    done = run(site, "train", *here, "epochs=1", "wandb=disabled", "run_dir=mine")
    assert done.returncode == 0, done.stderr
    assert "data parallelism" in done.stdout
    assert json.loads((site.parent / "mine" / "summary.json").read_text())["status"] == "finished"


def test_a_plan_names_what_is_missing_and_what_cannot_be_imported(site):
    planned, unsized, broken, misspelt = plans(
        site, RUN, ["dataset=my_data"], ["mode=broken"], ["mode=slwo", "model=my_nett"]
    )
    assert "timeline of slow" in planned[1], planned
    assert (unsized[0], "dataset.classes has no value yet: give one" in unsized[2]) == (2, True)
    code, _, said = broken
    assert code == 2
    assert "cdp_repro.modes 'broken', which an installed package has entered as my_package:missing" in said
    assert "AttributeError" in said and "Traceback" not in said
    assert misspelt[2].count("did you mean 'slow'?") == misspelt[2].count("did you mean 'my_net'?") == 1


def test_what_is_wrong_with_a_rule_or_a_model_is_told(site):
    wrong = {
        "mode=half": "error: HalfStale: staleness(0, 0) is 0.5: give a whole number, at least 0",
        "model=my_whole_net": "model my_whole_net is a Linear: give an nn.Sequential of its blocks, to cut it",
        "model=my_wrong_net": "cannot train on a micro-batch of 8: part 1 of 2 (Linear) cannot be run: ",
    }
    for (code, _, said), expected in zip(plans(site, *([*RUN, each] for each in wrong)), wrong.values(), strict=True):
        assert code == 2 and expected in said and "Traceback" not in said
