"""Whole runs: what they write, and that a run stopped anywhere and resumed equals the uninterrupted one, bitwise."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from offline_wandb import history, records, wandb_files
from omegaconf import OmegaConf
from torch import nn

from cdp_repro import Engine
from cdp_repro.config import RunConfig, load_config
from cdp_repro.config.compose import compose_config
from cdp_repro.data.in_memory import InMemoryDataset
from cdp_repro.engine.executor import Executor
from cdp_repro.engine.randomness import generator
from cdp_repro.observe import run_directory
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import SUMMARY, RunDirectory, RunDirectoryError, arguments_to_go_on
from cdp_repro.predict.forecast import make_plan
from cdp_repro.schedule import Action
from cdp_repro.training.checkpoint import CheckpointError, CheckpointStore
from cdp_repro.training.divergence import DivergedError
from cdp_repro.training.evaluate import Score
from cdp_repro.training.resuming import refuse_foreign
from cdp_repro.training.run import train
from cdp_repro.training.trainer import Interrupted, Trainer

MODES = ("mode=dp", "mode=cdp_v1", "mode=cdp_v2", "mode=[[1,2,1,1],[1,1,3,1],[1,1,1,1],[2,1,1,0]]")


def run(directory: Path, *overrides: str) -> dict[str, object]:
    return train(compose_config(overrides), directory, ["test"])


def resume(directory: Path, restart: bool = False) -> dict[str, object]:
    config = load_config(OmegaConf.create(RunDirectory.open(directory).config()))
    return train(config, directory, ["test"], resume=True, restart=restart)


def final_state(directory: Path) -> dict[str, object]:
    return CheckpointStore(directory / "checkpoints").load().tensors


def assert_same(one: object, other: object, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert one == other, where


def assert_same_run(one: Path, other: Path) -> None:
    assert_same(final_state(one), final_state(other))
    assert read_metrics(one / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")


def test_a_run_writes_every_file_and_they_agree(tmp_path, tiny):
    summary = run(tmp_path / "run", *tiny, "mode=cdp_v2")
    directory = RunDirectory.open(tmp_path / "run")
    assert json.loads(directory.summary_path.read_text()) == summary
    assert summary["status"] == "finished"
    rows = read_metrics(directory.metrics_path)
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, 11))
    assert rows[-1]["eval/top1_percent"] == summary["eval/top1_percent"]
    with directory.memory_path.open() as file:
        memory = list(csv.DictReader(file))
    assert max(int(row["activation_bytes"]) for row in memory) == summary["memory/activation_peak_bytes_total"]
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated"]
    assert summary["memory/activation_peak_bytes_total"] < summary["memory/activation_peak_bytes_simulated_dp"]
    planned = make_plan(compose_config([*tiny, "mode=cdp_v2"])).chosen.memory
    assert summary["memory/bytes_per_device_simulated"] == planned.together
    events = json.loads(directory.trace_path.read_text())["traceEvents"]
    forwards = [Action.parse(f"{event['name']}: ->") for event in events if event.get("cat") == "forward"]
    assert len(forwards) >= 3 * 4 * 4 - 10 and all(action.version >= 0 for action in forwards)
    assert directory.comms_path.read_text() == "slot,source,destination,kind,stage,bytes\n"
    assert "epoch 2/2" in directory.log_path(0).read_text()
    assert summary["ledger/reads"] == 10 * 4 * 4 * 2


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", "pipedream"])
@pytest.mark.parametrize("interval", [2, 3, 5])
def test_seconds_of_a_step_are_those_of_its_work_however_short_the_segments(
    tmp_path, tiny, monkeypatch, mode, interval
):
    """A clock that only ticks for forwards and backwards gives each step the same seconds."""
    ticks = [0.0]

    def run_action(self, action):
        ticks[0] += action.op.is_compute
        plain(self, action)

    plain = Executor._run
    monkeypatch.setattr(Executor, "_run", run_action)
    monkeypatch.setattr("cdp_repro.training.trainer.time.perf_counter", lambda: ticks[0])
    choices = ("epochs=4", f"checkpoint_every_steps={interval}", "traced_steps=0", "workers=2", f"mode={mode}")
    summary = run(tmp_path / "run", *tiny, *choices)
    micro_batches, stages = 1 if mode == "pipedream" else 2, 2
    worked = summary.get("time/step_seconds_median")
    assert worked == 2 * micro_batches * stages or (worked is None and interval < 5)
    assert worked is not None or mode != "dp"


def test_the_measured_peak_of_dp_is_the_simulated_one(tmp_path, tiny):
    summary = run(tmp_path / "run", *tiny, "mode=dp", "traced_steps=1")
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated_dp"]


def test_a_trace_that_ends_in_the_fill_gives_no_numbers_of_a_step(tmp_path, tiny, caplog):
    of_a_step = {"comm/bytes_per_device_per_step", "comm/messages_per_step", "time/idle_share_of_slots"}
    for steps, has in ((1, False), (2, False), (3, True)):
        caplog.clear()
        summary = run(tmp_path / str(steps), *tiny, "mode=cdp_v2", f"traced_steps={steps}")
        assert of_a_step & summary.keys() == (of_a_step if has else set())
        assert summary["memory/activation_peak_bytes_total"] > 0
        assert ("use traced_steps=3 or more" in caplog.text) != has


def test_a_pipeline_that_fills_for_more_than_three_steps_is_measured_until_it_is_full(tmp_path, tiny):
    summary = run(tmp_path / "run", *tiny, "mode=pipedream", "model=mlp")
    assert summary["memory/versions_kept"] == 4
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_stopped_in_mid_epoch_resumes_bitwise(tmp_path, tiny, mode, monkeypatch):
    run(tmp_path / "whole", *tiny, mode)
    batches = InMemoryDataset.train_batches

    def interrupted(self, steps, **settings):
        for step, batch in zip(steps, batches(self, steps, **settings), strict=True):
            if step == 7:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(InMemoryDataset, "train_batches", interrupted)
        with pytest.raises(Interrupted) as caught:
            run(tmp_path / "cut", *tiny, mode)
    assert caught.value.signal == signal.SIGINT
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "interrupted"
    stopped_at = CheckpointStore(tmp_path / "cut" / "checkpoints").load().step
    assert 5 < stopped_at < 10
    resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def run_interrupted(monkeypatch, at, *arguments):
    """Run, as `run` does, until a signal that comes when the mini-batch of step `at` is read."""
    batches = Trainer._batches

    def interrupted(self, first, end, stop):
        for step, batch in enumerate(batches(self, first, end, stop), start=first):
            if step == at:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "_batches", interrupted)
        run(*arguments)


@pytest.mark.parametrize("mode", ["dp", "cdp_v2", "pipedream"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_run_stopped_while_it_is_traced_is_traced_again(tmp_path, tiny, monkeypatch, mode, step):
    whole = run(tmp_path / "whole", *tiny, f"mode={mode}", "model=mlp")
    run_interrupted(monkeypatch, step, tmp_path / "cut", *tiny, f"mode={mode}", "model=mlp")
    resume(tmp_path / "cut")
    cut = json.loads((tmp_path / "cut" / "summary.json").read_text())
    names = [name for name in whole if name.startswith(("memory/", "comm/"))]
    assert {name: cut.get(name) for name in names} == {name: whole[name] for name in names}


def test_a_trace_that_is_longer_than_the_run_is_kept_when_the_end_is_repeated(tmp_path, tiny):
    """As after a kill in the last evaluation."""
    whole = run(tmp_path / "run", *tiny, "mode=cdp_v2", "epochs=1", "traced_steps=100")
    (tmp_path / "run" / "summary.json").unlink()
    assert resume(tmp_path / "run")["memory/activation_peak_bytes_total"] == whole["memory/activation_peak_bytes_total"]
    assert (tmp_path / "run" / "trace.json").exists()


def test_the_model_is_evaluated_when_it_is_due_and_at_the_end(tmp_path, tiny):
    run(tmp_path / "run", *tiny, "epochs=3", "evaluate_every_epochs=2")
    ends = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/epoch_loss" in row]
    assert [(row["epoch"], "eval/loss" in row) for row in ends] == [(0, False), (1, True), (2, True)]


def test_the_end_of_an_epoch_is_logged_once_though_a_run_is_killed_after_it(tmp_path, tiny):
    run(tmp_path / "whole", *tiny, "checkpoint_every_steps=5")
    whole = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(CheckpointStore(tmp_path / "run" / "checkpoints").latest())  # that of step 10: step 5 is left
    (tmp_path / "run" / "summary.json").unlink()
    resume(tmp_path / "run")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == whole


class NoisyGradient(torch.autograd.Function):
    """Adds noise of torch's default generator to the gradient, as stochastic rounding does."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.rand(()) / 100


class Noisy(nn.Module):
    def forward(self, values):
        return NoisyGradient.apply(values)


def test_what_a_backward_draws_depends_on_the_seed_alone_and_goes_on_after_a_resume(tmp_path, tiny, monkeypatch, mine):
    """Forwards and updates draw by seeds of their own; all else draws from torch's default generator."""

    def build(spec):
        layers = [nn.Sequential(nn.LazyLinear(8), Noisy()) for _ in range(3)]
        model = nn.Sequential(nn.Flatten(), *layers, nn.LazyLinear(spec.classes))
        model(torch.zeros(1, *spec.input_shape))
        return model

    config = mine(build, *tiny, "workers=2")
    torch.manual_seed(1)
    train(config, tmp_path / "whole", ["test"])
    torch.manual_seed(2)
    monkeypatch.setitem(globals(), "run", lambda directory: train(config, directory, ["test"]))
    run_interrupted(monkeypatch, 6, tmp_path / "run")
    torch.manual_seed(3)
    train(config, tmp_path / "run", ["test"], resume=True)
    assert_same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


def recorded_labels(monkeypatch) -> dict[int, list[int]]:
    """Return, by the engine's own count of training steps, the labels that it is given from now on."""
    seen: dict[int, list[int]] = {}
    honest = Engine.run

    def run_recorded(self, batches):
        def recorded(first=self.step):
            for step, batch in enumerate(batches, start=first):
                assert step not in seen, f"training step {step} has run before"
                seen[step] = torch.cat([batch.targets(i) for i in range(4)]).tolist()
                yield batch

        return honest(self, recorded())

    monkeypatch.setattr(Engine, "run", run_recorded)
    return seen


def test_a_run_resumed_in_mid_epoch_trains_on_the_documented_images(tmp_path, tiny, monkeypatch):
    every_image_a_class = [*tiny, "dataset.classes=80", "dataset.train_samples=80", "seed=3", "mode=cdp_v2"]
    seen = recorded_labels(monkeypatch)
    run_interrupted(monkeypatch, 6, tmp_path / "run", *every_image_a_class)
    assert 5 < len(seen) < 10, "stopped in mid-epoch"
    resume(tmp_path / "run")
    orders = [torch.randperm(80, generator=generator("cpu", 3, "order", epoch)).tolist() for epoch in range(2)]
    assert seen == {step: orders[step // 5][16 * (step % 5) :][:16] for step in range(10)}


@pytest.mark.parametrize("shared", ["replicas=2", "accumulate=2"])
def test_replicas_and_accumulation_share_the_mean_over_all_micro_batches(tmp_path, tiny, shared):
    plain = [*tiny, "mode=dp", "stages=4", "model.dropout=0", "precision=fp64", "optim.momentum=0", "batch_size=16"]
    run(tmp_path / "alone", *plain, "workers=4")
    run(tmp_path / "shared", *plain, "workers=2", shared)
    one, other = (final_state(tmp_path / name)["engine"] for name in ("alone", "shared"))
    assert one["step"] == other["step"] == 10
    for mine, theirs in zip(one["stages"], other["stages"], strict=True):
        torch.testing.assert_close(mine["versions"][10], theirs["versions"][10], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES[:3])
def test_a_run_killed_at_a_random_moment_resumes_bitwise(tmp_path, tiny, mode):
    overrides = (*tiny, mode, "epochs=30", "checkpoint_every_steps=3", "keep_checkpoints=1")
    run(tmp_path / "whole", *overrides)
    command = [sys.executable, "-m", "cdp_repro.cli.train", *overrides, f"run_dir={tmp_path / 'killed'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    enough_rows = random.Random(mode).randrange(5, 30)  # early, so that it cannot be over on a busy machine
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= enough_rows):
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    resume(tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_run_killed_before_its_first_checkpoint_starts_again_if_asked_to(tmp_path, tiny):
    run(tmp_path / "whole", *tiny)
    config = compose_config(tiny)
    directory = RunDirectory.create(tmp_path / "killed", config.to_dict(), ["test"])
    directory.metrics_path.write_text('{"step": 1, "train/loss": 3.0}\n{"step": 2, "tr')
    rows = directory.metrics_path.read_bytes()
    with pytest.raises(CheckpointError, match=r"killed has no checkpoint to go on from. Add restart=true"):
        resume(tmp_path / "killed")
    assert directory.metrics_path.read_bytes() == rows
    assert arguments_to_go_on(directory.path) == [f"resume={directory.path}", "restart=true"]
    resume(tmp_path / "killed", restart=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: ({}, meta),
        lambda tensors, meta: ({**tensors, "engine": []}, meta),
        lambda tensors, meta: ({**tensors, "engine": {**tensors["engine"], "stages": [7] * 4}}, meta),
        lambda tensors, meta: ({**tensors, "torch_random_state": 7}, meta),
        lambda tensors, meta: (tensors, {**meta, "position": 7}),
        lambda tensors, meta: (tensors, {**meta, "config": 7}),
        lambda tensors, meta: (tensors, {**meta, "blocks_per_stage": ["all"]}),
        lambda tensors, meta: (tensors, {key: value for key, value in meta.items() if key != "position"}),
    ],
)
def test_a_checkpoint_of_another_content_is_refused(tmp_path, tiny, change):
    run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    whole = store.load()
    store.save(whole.step, *change(whole.tensors, whole.meta))
    with pytest.raises(CheckpointError, match=r"does not fit this run|of another run"):
        resume(tmp_path / "run")


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(tmp_path, tiny):
    first = run(tmp_path / "run", *tiny)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    shutil.rmtree(tmp_path / "run" / "logs")  # made by whatever may write
    before = {path: content for path, content in before.items() if path.exists()}
    assert resume(tmp_path / "run") == first
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "run" / "logs").exists()


def test_what_is_resumed_at_the_very_end_has_the_whole_summary(tmp_path, tiny):
    first = run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()
    traces = {name: (tmp_path / "run" / name).read_bytes() for name in ("trace.json", "memory.csv", "comms.csv")}
    again = resume(tmp_path / "run")
    timed = {key for key in first if key.startswith(("time/", "throughput/"))}
    assert {key: again[key] for key in first.keys() - timed} == {key: first[key] for key in first.keys() - timed}
    assert {name: (tmp_path / "run" / name).read_bytes() for name in traces} == traces


def test_one_process_at_a_time_trains_in_a_directory(tmp_path, tiny):
    run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()
    with (
        RunDirectory.open(tmp_path / "run").locked(),
        pytest.raises(RunDirectoryError, match="another process is training"),
    ):
        resume(tmp_path / "run")


def test_a_run_whose_directory_is_moved_ends_and_makes_no_other(tmp_path, tiny, monkeypatch):
    honest = Trainer._batches

    def batches(self, first, end, stop):
        for step, batch in enumerate(honest(self, first, end, stop), start=first):
            if step == 7:
                (tmp_path / "run").rename(tmp_path / "moved")
            yield batch

    monkeypatch.setattr(Trainer, "_batches", batches)
    with pytest.raises(RunDirectoryError, match="was moved, removed or replaced while this run trained in it"):
        run(tmp_path / "run", *tiny, "checkpoint_every_steps=2")
    assert not (tmp_path / "run").exists()
    (tmp_path / "moved").rename(tmp_path / "run")
    monkeypatch.setattr(Trainer, "_batches", honest)
    assert resume(tmp_path / "run")["status"] == "finished"


def test_a_resumed_run_is_cut_as_it_was(tmp_path, tiny, monkeypatch):
    """Measured times differ from run to run; the cut must not."""
    whole = run(tmp_path / "run", *tiny, "partition=time")
    (tmp_path / "run" / "summary.json").unlink()
    slow_first_block = lambda network, *_: [1.0, *[0.0] * (len(network.stages) - 1)]  # noqa: E731
    monkeypatch.setattr("cdp_repro.predict.cutting.time_stages", slow_first_block)
    assert resume(tmp_path / "run")["stages/blocks"] == whole["stages/blocks"]


def test_a_run_of_two_codes_says_so(tmp_path, tiny, monkeypatch, caplog):
    """Else its row would pass for one of the later code."""
    first = run(tmp_path / "run", *tiny)["version/code"]
    shutil.rmtree(CheckpointStore(tmp_path / "run" / "checkpoints").latest())  # so that the other code trains an epoch
    for code in ("b" * 64, first.ljust(64)):
        (tmp_path / "run" / "summary.json").unlink()
        monkeypatch.setattr("cdp_repro.observe.versions.code_hash", lambda _, code=code: code)
        summary = resume(tmp_path / "run")
    assert summary["version/code"] == f"{first} and {'b' * 16}"
    assert summary["version/torch"] == torch.__version__
    told = [each.message for each in caplog.records if "goes on by other code" in each.message]
    assert len(told) == 1 and f"code {first} and {'b' * 16} (commit " in told[0]


def test_a_run_that_goes_on_with_another_number_of_threads_says_that_its_bits_are_others(
    tmp_path, tiny, monkeypatch, caplog
):
    run(tmp_path / "run", *tiny)
    for threads, warnings in ((torch.get_num_threads(), 0), (7, 1)):
        (tmp_path / "run" / "summary.json").unlink()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        summary = resume(tmp_path / "run")
        told = [each.message for each in caplog.records if "not bit for bit" in each.message]
        assert len(told) == warnings
    assert summary["hardware"].endswith("CPU, 7 CPU threads")
    assert "another number of threads (" in told[0] and summary["hardware"] in told[0]


def test_values_without_influence_may_change_before_a_resume(tmp_path, tiny):
    run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("log_every_steps: 1", "log_every_steps: 7"))
    assert resume(tmp_path / "run")["status"] == "finished"


def test_a_checkpoint_of_another_configuration_or_other_data_is_refused(tmp_path, tiny):
    run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed just before the end
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("lr: 0.1", "lr: 0.2"))
    with pytest.raises(CheckpointError, match=r"optim.lr is 0.1 in the checkpoint, 0.2 in the run"):
        resume(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("workers: 4", "workers: 2"))
    with pytest.raises(CheckpointError, match=r"workers is 4 in the checkpoint, 2 in the run"):
        resume(tmp_path / "run")  # of stages that the checkpoint's cut does not fit


def test_a_checkpoint_of_a_version_with_fewer_settings_is_of_the_same_run():
    now = RunConfig().to_dict()
    before = {key: value for key, value in now.items() if key not in ("partition", "collectives")}
    refuse_foreign({"config": before, "data": {}}, {"config": now, "data": {}})
    with pytest.raises(CheckpointError, match="partition is flops in the checkpoint, time in the run"):
        refuse_foreign({"config": before, "data": {}}, {"config": {**now, "partition": "time"}, "data": {}})


def test_a_damaged_checkpoint_is_refused_and_harms_nothing(tmp_path, tiny):
    run(tmp_path / "run", *tiny)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed just before the end
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    before = read_metrics(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        resume(tmp_path / "run")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == before


def test_a_loss_that_is_not_finite_stops_the_run_after_a_checkpoint(tmp_path, tiny):
    with pytest.raises(DivergedError, match=r"training step \d+ is (nan|inf).*smaller optim\.lr"):
        run(tmp_path / "run", *tiny, "optim.lr=1e12", "optim.warmup_epochs=0")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"
    saved = CheckpointStore(tmp_path / "run" / "diverged").load()
    assert saved.step > 0
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest() is None


def test_a_run_that_diverges_again_names_the_state_of_this_time(tmp_path, tiny):
    """It is that after all steps that had begun: an earlier one where the pipeline drains after each step."""
    with pytest.raises(DivergedError, match=r"saved in \S+step-000000003;"):
        run(tmp_path / "run", *tiny, "optim.lr=1e12", "optim.warmup_epochs=0")
    config = load_config(OmegaConf.create(RunDirectory.open(tmp_path / "run").config()))
    config.checkpoint_every_steps = 1
    with pytest.raises(DivergedError, match=r"saved in \S+step-00000000[12];"):
        train(config, tmp_path / "run", ["test"], resume=True, restart=True)


def test_no_checkpoint_to_go_on_from_has_a_parameter_that_is_not_finite(tmp_path, tiny):
    """The loss that shows it would come a step later, and a run that resumed between them would only diverge again."""
    huge = ("mode=cdp_v1", "optim.lr=1e38", "optim.momentum=0.99", "optim.warmup_epochs=0", "model.dropout=0")
    with pytest.raises(DivergedError, match=r"a parameter of stage \d is not finite after \d+ training steps; .*Try"):
        run(tmp_path / "run", *tiny, *huge, "checkpoint_every_steps=1")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        for stage in CheckpointStore(path.parent).load(path).tensors["engine"]["stages"]:
            assert all(each.isfinite().all() for version in stage["versions"].values() for each in version.values())


def test_a_run_whose_last_evaluation_is_not_finite_has_diverged(tmp_path, tiny, monkeypatch):
    honest = Score.means
    monkeypatch.setattr(Score, "means", lambda self: honest(self) | {"eval/loss": math.nan})
    with pytest.raises(DivergedError, match=r"the last evaluation is not finite: .*Try a smaller"):
        run(tmp_path / "run", *tiny)
    summary = RunDirectory.open(tmp_path / "run").summary()
    assert summary["status"] == "diverged" and math.isnan(summary["eval/loss"])
    with pytest.raises(DivergedError):
        resume(tmp_path / "run")


def test_a_copy_of_the_data_under_another_name_is_the_same():
    theirs, ours = ({"description": f"text of {name}", "fingerprint": "f"} for name in ("a.txt", "b.txt"))
    refuse_foreign({"data": theirs}, {"data": ours})
    with pytest.raises(
        CheckpointError, match=r"data are not those.*; fingerprint is f in the checkpoint, g in the run"
    ):
        refuse_foreign({"data": theirs}, {"data": {**ours, "fingerprint": "g"}})


def test_a_summary_that_cannot_be_written_does_not_hide_why_a_run_ended(tmp_path, tiny, monkeypatch):
    def full(path: Path, content: bytes) -> None:
        if path.name == SUMMARY:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr(run_directory, "replace_file", full)
    with pytest.raises(DivergedError) as failure:
        run(tmp_path / "run", *tiny, "optim.lr=1e12", "optim.warmup_epochs=0")
    (note,) = failure.value.__notes__
    assert "the end of the run could not be recorded: cannot write to" in note
    assert "summary.json: No space left on device" in note


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_precisions_train(tmp_path, tiny, precision):
    summary = run(tmp_path / "run", *tiny, f"precision={precision}", "epochs=6", "model.dropout=0")
    assert summary["train/loss"] < 2.2
    stages = final_state(tmp_path / "run")["engine"]["stages"]
    dtypes = {tensor.dtype for stage in stages for tensor in stage["versions"][30].values()}
    assert dtypes == {torch.float64 if precision == "fp64" else torch.float32}


def test_wandb_shows_the_runs_of_a_sweep_as_a_group(tmp_path, tiny):
    (tmp_path / "sweep.json").touch()
    words = (text for text in tiny if not text.startswith(("wandb=", "epochs")))
    run(tmp_path / "seed=0", *words, "epochs=1", "traced_steps=0")
    (begun,) = (record.run for record in records(wandb_files(tmp_path / "seed=0")[0]) if record.HasField("run"))
    assert (begun.run_group, begun.display_name) == (tmp_path.name, "seed=0")


def test_wandb_mirrors_rows_tables_pictures_and_files(tmp_path, tiny):
    run(tmp_path / "run", *(text for text in tiny if not text.startswith("wandb=")), "accumulate=2")
    (file,) = wandb_files(tmp_path / "run")
    rows = history(file)
    mirrored = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    written = read_metrics(tmp_path / "run" / "metrics.jsonl")
    logged = {row["step"]: row["train/loss"] for row in written if "train/loss" in row}
    assert mirrored == logged
    keys = {key.split("/")[0] for row in rows for key in row}
    assert {"ledger", "memory", "timeline", "memory_curve"} <= keys
    ledger = next((tmp_path / "run").rglob("ledger*.table.json"))
    table = json.loads(ledger.read_text())
    reads = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    micro_batch = {read["action"]: int(read["action"].split("@")[0].split("m")[1]) for read in reads}
    for read in reads:
        m = micro_batch[read["action"]]
        assert (read["step"], read["worker"]) == (m // 8, m % 4), "M = 8 with N = 4"
    assert reads
    assert {"trace"} <= {r.request.log_artifact.artifact.type for r in records(file)} | {
        r.artifact.type for r in records(file) if r.HasField("artifact")
    }
