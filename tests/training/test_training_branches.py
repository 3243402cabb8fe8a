"""A model with two towers, trained: bitwise the same on ranks, and whole from cut to weights."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from cdp_repro.cli import plan, train
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.models import ModelSpec, build_model
from cdp_repro.models.chain import hidden_matrices
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.systems import systems_of
from cdp_repro.training.equivalence import verify
from cdp_repro.training.weights import export

IMAGES = ("dataset=synthetic", "dataset.image_size=8", "dataset.train_samples=48", "dataset.test_samples=12")
TOWERS = (*IMAGES, "model=two_towers", "model.width=4", "workers=3", "batch_size=12", "epochs=1", "wandb=disabled")


@pytest.mark.parametrize(
    "choices",
    [
        ("mode=one_f_one_b", "placement=pipeline"),
        ("mode=zero_bubble", "placement=pipeline", "stages=6", "ranks=3"),
        ("mode=cdp_v2", "placement=pipeline", "delay=prediction"),
        ("mode=cdp_v1", "placement=zero", "optim=muon"),
    ],
)
def test_ranks_compute_what_one_device_computes(choices):
    found = verify(compose_config([*TOWERS, *choices, "precision=fp64", "device=cpu"]), steps=4)
    assert found.agrees and found.tolerance == 0.0 and found.ranks == 3


def test_a_run_on_a_pipeline_evaluates_and_counts_as_one_device_does(tmp_path):
    summaries = []
    for name, placement in (("alone", "single_device"), ("ranks", "pipeline")):
        overrides = [*TOWERS, "mode=one_f_one_b", f"placement={placement}", "precision=fp64"]
        assert train.main([*overrides, f"run_dir={tmp_path / name}"]) == 0
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
    alone, ranks = summaries
    assert alone["eval/loss"] == ranks["eval/loss"] and alone["eval/top1_percent"] == ranks["eval/top1_percent"]
    assert ranks["time/idle_share_of_slots"] == pytest.approx(1 / 4), "one of M + E-1 = 4 units, with E = 2"
    for summary in summaries:
        peaks = (summary[f"memory/activation_peak_bytes_{of}"] for of in ("total", "simulated"))
        assert len({*peaks}) == 1
    export(tmp_path / "ranks", tmp_path / "weights.safetensors")
    plain = build_model("two_towers", ModelSpec(input_shape=(3, 8, 8), classes=10, depth=2, width=4))
    plain.double().load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)


def test_ranks_that_hold_stages_of_both_towers_train_to_the_end(tmp_path, capsys):
    choices = (*TOWERS, "mode=cdp_v1", "placement=pipeline", "workers=2", "stages=6", "model.depth=2")
    assert plan.main(choices) == 0
    planned = capsys.readouterr().out
    assert "dp is on 6 ranks: on 2, a rank would hold stages of several branches" in planned
    assert train.main([*choices, f"run_dir={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("total", "simulated", "simulated_dp"):
        assert format_bytes(summary[f"memory/activation_peak_bytes_{name}"]) in planned


def test_each_part_is_cut_by_itself():
    cut = cut_model(compose_config([*TOWERS, "stages=6", "model.depth=3"]))
    parts = [names[0].rstrip("0123456789") for names in cut.block_names]
    assert parts == [part for part in ("left", "right", "trunk") for _ in range(2)]


def test_muon_leaves_out_what_meets_the_image():
    config = compose_config([*TOWERS])
    stages = cut_model(config).stages
    names = {id(p): name for stage in stages for name, p in stage.named_parameters()}
    hidden = {names[id(p)] for p in hidden_matrices(stages, config.sources)}
    assert {name.partition(".")[0] for name in hidden} == {"left1", "right1", "trunk0", "trunk1"}


def test_systems_of_a_branched_model_run_its_branches_at_once():
    found = {s.mode: s for s, _ in systems_of(compose_config([*TOWERS])) if s.spec.placement == "pipeline"}
    assert "interleaved" not in found and "chimera" not in found
    assert all(schedule.sizes.chosen_sources for schedule in found.values())
    assert found["gpipe"].slots_per_step == 2 * (3 + 2 - 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["workers=4"], "stages=4 is not a multiple of 3"),
        (["mode=dp", "baseline=ddp"], "baseline=ddp runs a chain, which model=two_towers is not: use model=resnet8"),
        (["dataset=text"], "which model=two_towers cannot read: use model=gpt"),
        (["mode=chimera", "placement=pipeline", "workers=6"], "not branches that join"),
    ],
)
def test_what_branches_cannot_do_is_refused(overrides, said):
    kept = [text for text in TOWERS if text.split("=")[0] not in {each.split("=")[0] for each in overrides}]
    kept = [text for text in kept if overrides != ["dataset=text"] or not text.startswith("dataset.")]
    with pytest.raises(ConfigError, match=said):
        compose_config([*kept, *overrides])


def test_more_stages_than_blocks_name_what_works():
    with pytest.raises(ConfigError, match=r"branches of 2, 2, 3 blocks.*stages=9.*at most stages=6"):
        cut_model(compose_config([*TOWERS, "stages=9"]))
