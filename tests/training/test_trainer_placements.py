"""Whole runs in several processes: they equal one process bitwise, go on anywhere, and end together."""

from __future__ import annotations

import csv
import os
import random
import re
import shutil
import signal
import time
from itertools import product

import pytest
import torch
from conftest import TINY
from PIL import Image
from ranks import run_ranks

from cdp_repro.config.compose import compose_config
from cdp_repro.data import DatasetError
from cdp_repro.data.order import epoch_order
from cdp_repro.launch import RankFailedError, StalledError, launch
from cdp_repro.launch.team import _store_of_all
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program
from cdp_repro.training import assembly
from cdp_repro.training.checkpoint import CheckpointStore
from cdp_repro.training.run import train
from cdp_repro.training.trainer import Interrupted, Trainer

PLACEMENTS = ("replicated", "zero", "model_parallel", "pipeline", "parameter_server")
COLLECTIVE = ("replicated collectives=true", "zero collectives=true")
"""Two ranks: a sum of two does not depend on its order, so that these are bitwise, too."""
RUNS = [*(("cdp_v2", name) for name in PLACEMENTS), *(("dp", name) for name in COLLECTIVE)]
STEPS = 10
IMPORTS = ("torch._dynamo",)
"""What each rank would else import for its optimizer, in two seconds."""


def config_of(tiny, *overrides):
    return compose_config([*tiny, "precision=fp64", "workers=2", "checkpoint_every_steps=2", *overrides])


def train_run(config, run_dir, resume=False, stop_at=None, hurt=None, asked=0):
    """Train; at step `stop_at` rank `asked` is interrupted, or rank `hurt[0]` sends itself the signal `hurt[1]`."""
    honest = Trainer._batches

    def batches(self, first, end, stop):
        for step, batch in enumerate(honest(self, first, end, stop), start=first):
            if step == stop_at and hurt is None and self._team.rank == asked:
                os.kill(os.getpid(), signal.SIGINT)
            if step == stop_at and hurt is not None and self._team.rank == hurt[0]:
                os.kill(os.getpid(), hurt[1])
                time.sleep(5)
            yield batch

    Trainer._batches = batches
    try:
        return train(config, run_dir, ["test"], resume)
    except Interrupted as interrupted:
        return str(interrupted)
    finally:
        Trainer._batches = honest


def run(config, run_dir, tmp_path, **settings):
    return run_ranks(train_run, config.processes, config, run_dir, *settings.values(), folder=tmp_path, joins=True)[0]


def outcome(run_dir):
    checkpoint = CheckpointStore(run_dir / "checkpoints").load()
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(run_dir / "metrics.jsonl")]
    return checkpoint, rows


def tensors(value, path=""):
    if isinstance(value, torch.Tensor):
        return {path: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {name: tensor for key, part in parts for name, tensor in tensors(part, f"{path}/{key}").items()}


def same_outcome(mine, theirs):
    (mine, my_rows), (theirs, their_rows) = outcome(mine), outcome(theirs)
    assert mine.step == theirs.step == STEPS
    a, b = tensors(mine.tensors["engine"]), tensors(theirs.tensors["engine"])
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    for row, other in zip(my_rows, their_rows, strict=True):
        assert row.keys() == other.keys()
        assert {k: v for k, v in row.items() if k != "eval/loss"} == {
            k: v for k, v in other.items() if k != "eval/loss"
        }
        assert row.get("eval/loss", 0) == pytest.approx(other.get("eval/loss", 0), rel=1e-12)  # summed in parts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run on one device, by mode."""
    tiny = TINY
    folder = tmp_path_factory.mktemp("alone")
    for mode in ("dp", "cdp_v1", "cdp_v2"):
        train(config_of(tiny, f"mode={mode}"), folder / mode, ["test"])
    return folder


@pytest.mark.parametrize(
    ("mode", "placement"), [*product(("dp", "cdp_v1", "cdp_v2"), PLACEMENTS), *(("dp", name) for name in COLLECTIVE)]
)
def test_a_run_on_any_placement_is_that_on_one_device(tmp_path, tiny, alone, placement, mode):
    config = config_of(tiny, f"mode={mode}", *f"placement={placement}".split())
    summary = run(config, tmp_path / "run", tmp_path)
    same_outcome(tmp_path / "run", alone / mode)
    where = config.placement.name
    assert (summary["status"], summary["placement"], summary["ranks"]) == ("finished", where, config.processes)
    with (tmp_path / "run" / "comms.csv").open() as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    costs = cut_model(config).costs
    simulated = simulate(Program(config.schedule(costs.gradient_bytes)), costs, 2).messages
    expected = [(m.slot, m.source, m.destination, m.kind, m.stage, m.bytes) for m in simulated]
    end = max(m.slot for m in simulated)
    assert [row for row in rows if int(row[0]) <= end] == [tuple(map(str, row)) for row in expected]
    assert all((tmp_path / "run" / "logs" / f"rank{rank}.log").exists() for rank in range(config.processes))


@pytest.mark.parametrize(
    ("first", "second"), [("replicated", "pipeline"), ("pipeline", "zero"), ("zero", "model_parallel"),
                          ("model_parallel", "parameter_server"), ("parameter_server", "single_device"),
                          ("single_device", "replicated")],
)  # fmt: skip
@pytest.mark.parametrize(("mode", "from_end"), [("cdp_v1", 0), ("cdp_v2", 1)])
def test_a_run_interrupted_on_any_rank_goes_on_bitwise_on_another_placement(
    tmp_path, tiny, alone, mode, from_end, first, second
):
    config = config_of(tiny, f"mode={mode}", f"placement={first}", "checkpoint_every_steps=100")
    message = run(
        config, tmp_path / "run", tmp_path, resume=False, stop_at=1, hurt=None, asked=from_end * (config.processes - 1)
    )
    assert "stopped by signal 2" in message
    config.placement.name = second
    summary = run(config, tmp_path / "run", tmp_path, resume=True)
    same_outcome(tmp_path / "run", alone / mode)
    costs = cut_model(config).costs
    program = Program(config.schedule(costs.gradient_bytes))
    sent = simulate(program, costs, 5).bytes_sent_per_device_per_step(program.schedule.slots_per_step)
    assert summary["comm/bytes_per_device_per_step"] == pytest.approx(sent), "of the second placement"
    measured, simulated = (summary[f"memory/activation_peak_bytes_{name}"] for name in ("total", "simulated"))
    assert measured == simulated


def test_a_run_by_collectives_goes_on_without_them(tmp_path, tiny, alone):
    config = config_of(tiny, "mode=dp", "placement=zero", "collectives=true", "checkpoint_every_steps=100")
    assert "stopped by signal 2" in run(config, tmp_path / "run", tmp_path, resume=False, stop_at=4)
    config.placement.name, config.collectives = "single_device", False
    run(config, tmp_path / "run", tmp_path, resume=True)
    same_outcome(tmp_path / "run", alone / "dp")


def test_a_baseline_has_no_simulated_peak_of_a_schedule_that_it_does_not_run(tmp_path, tiny):
    summary = run(config_of(tiny, "mode=dp", "baseline=torch_1f1b", "epochs=1"), tmp_path / "run", tmp_path)
    assert summary["memory/activation_peak_bytes_simulated_dp"] > 0
    assert not {"memory/activation_peak_bytes_simulated", "memory/bytes_per_device_simulated"} & summary.keys()


@pytest.mark.parametrize(("mode", "placement"), RUNS)
def test_a_killed_rank_ends_all_and_the_run_goes_on_bitwise(tmp_path, tiny, alone, placement, mode):
    config = config_of(tiny, f"mode={mode}", *f"placement={placement}".split())
    draw = random.Random(f"{mode} {placement}")
    step, rank = draw.randrange(3, STEPS), draw.randrange(config.processes)
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match=rf"rank {rank} was killed by SIGKILL"):
        launch(
            train_run, (config, tmp_path / "run", False, step, (rank, signal.SIGKILL)), config.processes, 5.0, IMPORTS
        )
    assert time.monotonic() - begin < 60, "the start of the processes included"
    run(config, tmp_path / "run", tmp_path, resume=True)
    same_outcome(tmp_path / "run", alone / mode)


@pytest.mark.parametrize(("mode", "placement"), RUNS)
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(tmp_path, tiny, placement, mode):
    config = config_of(tiny, f"mode={mode}", *f"placement={placement}".split(), "timeout_seconds=20")
    hurt = random.Random(f"{mode} {placement}").randrange(config.processes)
    with pytest.raises(StalledError, match=f"^rank {hurt} stalls: ") as failure:
        launch(train_run, (config, tmp_path / "run", False, 4, (hurt, signal.SIGSTOP)), config.processes, 2.0, IMPORTS)
    assert failure.value.ranks == (hurt,)
    told = str(failure.value).splitlines()
    for rank in range(config.processes):  # it was hurt between the checkpoint and its first slot
        began = "the checkpoint of step 4" if rank == hurt else r"(slot \d+|the checkpoint of step 4)"
        assert any(re.match(rf"  rank {rank} began {began}", line) for line in told), told


def train_slowly(config, run_dir):
    """Train; rank 0, which cuts the model for all, has it only when rank 1 has waited for it in vain."""
    honest = assembly.cut_model

    def slow(*arguments):
        cut, store = honest(*arguments), _store_of_all()
        while store.get("cdp_repro/position/1/gave-up") == b"":
            time.sleep(0.1)
        return cut

    assembly.cut_model = slow
    return train(config, run_dir, ["test"])


def test_a_rank_that_takes_longer_than_others_wait_is_told_from_a_deadlock(tmp_path, tiny):
    config = config_of(tiny, "placement=replicated", "timeout_seconds=8")
    with pytest.raises(StalledError, match=r"^rank 0 kept others waiting for more than ") as failure:
        launch(train_slowly, (config, tmp_path / "run"), config.processes, 2.0, IMPORTS)
    assert "\n  rank 0 began cutting the model; it was left by the others: " in str(failure.value)
    assert "\n  rank 1 began cutting the model; it has waited in vain" in str(failure.value)


# Images that are decoded on the way


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A tree of 64 training images of two classes: an epoch of 16 mini-batches of four."""
    root = tmp_path_factory.mktemp("images")
    generator = random.Random(0)
    for split, name, k in product(("train", "val"), ("a", "b"), range(32)):
        (root / split / name).mkdir(parents=True, exist_ok=True)
        colour = tuple(generator.randrange(256) for _ in range(3))
        Image.new("RGB", (16, 16), colour).save(root / split / name / f"{k}.png")
    return root


def config_of_images(root, *overrides):
    return compose_config(
        [
            "dataset=imagenet", f"dataset.root={root}", "dataset.image_size=8", "dataset.classes=2",
            "dataset.loader_workers=0", "model=mlp", "model.depth=1", "model.hidden=4", "batch_size=4", "epochs=1",
            "workers=2", "precision=fp64", "wandb=disabled", "evaluation_batch_size=4", *overrides,
        ]
    )  # fmt: skip


def train_and_count(config, run_dir):
    """Train; return which training images this rank has decoded, and the error that ended the run, if one did."""
    opened, honest = [], Image.open
    Image.open = lambda file: opened.append(str(file)) or honest(file)
    error = None
    try:
        train(config, run_dir, ["test"])
    except DatasetError as damaged:
        error = str(damaged)
    finally:
        Image.open = honest
    return [file for file in opened if "/train/" in file], error


@pytest.mark.parametrize(
    ("what", "decoded"),
    [("placement=replicated", (32, 32)), ("placement=pipeline", (64, 0)), ("baseline=ddp", (32, 32))],
)
def test_a_rank_decodes_only_the_images_that_it_computes(tmp_path, images, what, decoded):
    config = config_of_images(images, "mode=dp" if "baseline" in what else "mode=cdp_v2", what)
    found = run_ranks(train_and_count, 2, config, tmp_path / "run", folder=tmp_path, joins=True)
    for (opened, error), expected in zip(found, decoded, strict=True):
        assert error is None
        assert len(set(opened)) == len(opened)
        assert expected <= len(opened) <= expected + 2  # an engine may read one micro-batch for the layout of messages


@pytest.mark.parametrize("step", [0, 1, 15])
def test_an_image_that_one_rank_alone_finds_damaged_stops_all_after_a_checkpoint(tmp_path, images, step):
    root = tmp_path / "images"
    shutil.copytree(images, root)
    of_rank_1 = epoch_order(64, 0, 0)[4 * step :][2:4].tolist()
    damaged = sorted((root / "train").glob("*/*"))[of_rank_1[0]]
    damaged.write_bytes(b"no image")
    config = config_of_images(root, "placement=replicated", "mode=cdp_v2")
    found = run_ranks(train_and_count, 2, config, tmp_path / "run", folder=tmp_path, joins=True)
    assert [str(damaged) in error for _, error in found] == [True, True]
    stopped = CheckpointStore(tmp_path / "run" / "checkpoints").load().step
    assert stopped == step if step <= 1 else 1 < stopped <= step  # the first steps are known before any is trained


@pytest.mark.parametrize("step", [0, 1, 15])
def test_a_damaged_image_ends_a_run_on_one_device_after_a_checkpoint(tmp_path, images, step):
    root = tmp_path / "images"
    shutil.copytree(images, root)
    damaged = sorted((root / "train").glob("*/*"))[epoch_order(64, 0, 0)[4 * step]]
    damaged.write_bytes(b"no image")
    _, error = train_and_count(config_of_images(root, "mode=cdp_v2"), tmp_path / "run")
    assert str(damaged) in error
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load().step == step


@pytest.mark.parametrize("placement", ["single_device", "pipeline"])
def test_a_damaged_test_image_costs_no_training_and_the_run_goes_on_bitwise(tmp_path, images, placement):
    root = tmp_path / "images"
    shutil.copytree(images, root)
    config = config_of_images(root, f"placement={placement}", "mode=cdp_v2", "epochs=2", "log_every_steps=1")

    def ends(run_dir, resume=False):
        if placement == "single_device":
            return train(config, run_dir, ["test"], resume)
        return launch(train, (config, run_dir, ["test"], resume), config.processes, 2, IMPORTS)

    ends(tmp_path / "whole")
    damaged = root / "val" / "b" / "9.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"no image")
    with pytest.raises(DatasetError, match=re.escape(str(damaged))) as failure:
        ends(tmp_path / "run")
    assert str(failure.value).endswith(f"this run goes on by: cdp-train resume={tmp_path / 'run'}")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.load().step == 16, "the training of the first epoch"
    damaged.write_bytes(whole)
    ends(tmp_path / "run", resume=True)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == read_metrics(tmp_path / "whole" / "metrics.jsonl")
    mine, theirs = (tensors(outcome(tmp_path / name)[0].tensors) for name in ("run", "whole"))
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
