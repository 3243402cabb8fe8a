"""A language model trained from text: what a run records, and that ranks compute what one device computes."""

from __future__ import annotations

import json
import math
import random

import pytest

from cdp_repro.cli import plan, train
from cdp_repro.config.compose import compose_config
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.studies.collecting import collect
from cdp_repro.training.equivalence import verify

WORDS = ("the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog ")
GPT = ("dataset=text", "model=gpt", "model.width=16", "model.depth=2", "model.heads=2", "model.context=16", "workers=2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(random.Random(0).choices(WORDS, k=3000)))
    return path


def test_a_run_learns_and_speaks_of_tokens(tmp_path, text, capsys):
    run_dir = tmp_path / "run"
    overrides = [*GPT, f"dataset.root={text}", "optim=adamw", "optim.lr=0.01", "optim.warmup_epochs=0", "batch_size=8",
                 "epochs=2", "delay=prediction", "wandb=disabled", f"run_dir={run_dir}"]  # fmt: skip
    assert train.main(overrides) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval/nats_per_token"] < 1.8 < math.log(20)
    assert summary["eval/bits_per_byte"] == pytest.approx(summary["eval/nats_per_token"] / math.log(2))
    assert 0 < summary["eval/top1_percent"] <= 100 and "eval/loss" not in summary
    assert summary["throughput/tokens_per_second"] > 0 and "throughput/images_per_second" not in summary
    assert summary["memory/activation_peak_bytes_total"] == summary["memory/activation_peak_bytes_simulated"]
    assert summary["delay"] == "prediction" and summary["memory/delay_bytes_per_device"] > 0
    assert summary["memory/predicted_parameter_bytes_per_device"] > 0
    told = capsys.readouterr().out
    assert f"validation loss       {summary['eval/nats_per_token']:.4f} nats a token after 2" in told
    assert ", mode cdp_v2 with prediction, " in told
    last = [row for row in read_metrics(run_dir / "metrics.jsonl") if "eval/nats_per_token" in row][-1]
    assert last["eval/nats_per_token"] == summary["eval/nats_per_token"]
    row = collect(run_dir, "mine")
    assert row.config["delay.name"] == "prediction" and row.summary["eval/nats_per_token"] < 1.8


def test_the_plan_speaks_of_tokens(capsys):
    assert plan.main([*GPT]) == 0
    assert "gpt, sequences of 16 tokens, mini-batch 32" in capsys.readouterr().out
    assert plan.main([*GPT, "price=true", "cluster.flops_per_second=1e9"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_replicas_of_sliced_sequences_read_their_own_samples(text):
    choices = ["mode=terapipe", "placement=pipeline", "stages=2", "workers=1", "ranks=2", "replicas=2"]
    config = compose_config([*GPT, *choices, f"dataset.root={text}", "precision=fp64", "batch_size=8", "device=cpu"])
    found = verify(config, steps=2)
    assert found.agrees and found.tolerance == 0.0 and found.ranks == 4


def test_a_run_on_slices_says_what_whole_sequences_say(tmp_path, text):
    """One epoch in float64 from the same weights: validation loss, tokens, and the simulated peak."""
    summaries = {}
    for mode in ("gpipe", "terapipe"):
        run_dir = tmp_path / mode
        overrides = [*GPT, f"dataset.root={text}", f"mode={mode}", "precision=fp64", "batch_size=8", "epochs=1",
                     "wandb=disabled", f"run_dir={run_dir}"]  # fmt: skip
        assert train.main(overrides) == 0
        summaries[mode] = json.loads((run_dir / "summary.json").read_text())
    whole, sliced = summaries["gpipe"], summaries["terapipe"]
    assert sliced["eval/nats_per_token"] == pytest.approx(whole["eval/nats_per_token"], abs=1e-9)
    assert sliced["memory/activation_peak_bytes_total"] == sliced["memory/activation_peak_bytes_simulated"]
    assert sliced["memory/activation_peak_bytes_total"] != whole["memory/activation_peak_bytes_total"]
    of_dp = "memory/activation_peak_bytes_simulated_dp"
    assert sliced[of_dp] == whole[of_dp], "data parallelism reads whole sequences"


@pytest.mark.parametrize(
    "choices",
    [
        ("placement=pipeline", "delay=prediction"),
        ("placement=zero", "delay=error_feedback", "optim=muon"),
        ("mode=terapipe", "placement=pipeline", "slices=4"),
    ],
)
def test_ranks_compute_what_one_device_computes(text, choices):
    config = compose_config([*GPT, *choices, f"dataset.root={text}", "precision=fp64", "batch_size=8", "device=cpu"])
    found = verify(config, steps=4)
    assert found.agrees and found.tolerance == 0.0 and found.ranks == 2
