"""Settings against delay, of optimizers and of text: what composes, and what is refused with what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdp_repro.baselines.baseline import Baseline
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.loading import without_effect
from cdp_repro.config.numerics import delay_factory
from cdp_repro.config.ranges import _CHOICES
from cdp_repro.engine.delay import DELAYS, Compensation, ErrorFeedback, Uncorrected
from cdp_repro.schedule import MODES

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", DELAYS)
def test_each_method_composes(name):
    config = compose_config([f"delay={name}"])
    assert config.delay.name == name
    assert type(delay_factory(config.delay)([1, 0])) is DELAYS[name]


def test_every_method_has_its_file_and_no_other_name_is_taken():
    assert {*_CHOICES["delay.name"]} == {*DELAYS} == {path.stem for path in (CONFIGS / "delay").glob("*.yaml")}


def test_strength_arrives():
    half = delay_factory(compose_config(["delay=error_feedback", "delay.strength=0.5"]).delay)([0])
    assert isinstance(half, ErrorFeedback) and half._strength == 0.5
    share = delay_factory(compose_config(["delay=error_feedback"]).delay)([1, 0, 0, 0])
    assert isinstance(share, ErrorFeedback) and share._strength == 0.25
    full = delay_factory(compose_config(["delay=compensation"]).delay)([1])
    assert isinstance(full, Compensation) and full._strength == 1.0
    assert type(delay_factory(compose_config([]).delay)([1])) is Uncorrected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["delay=predicton"], "unknown delay 'predicton': choose .*; did you mean 'prediction'?"),
        (["delay=prediction", "delay.strength=1"], "delay.strength has no effect with this delay"),
        (["delay=prediction", "optim.momentum=0"], "optim.momentum=0: use optim.momentum=0.9, or delay=error_feedback"),
        (["delay=prediction", "optim=muon", "optim.momentum=0"], "optim.momentum=0: use optim.momentum=0.9"),
        (["delay=prediction", "optim=adamw", "optim.beta1=0"], "optim.beta1=0: use optim.beta1=0.9"),
        (["delay=error_feedback", "delay.strength=-1"], "delay.strength=-1.0: must be a finite number, 0 or more"),
        (
            ["delay=prediction", "mode=dp", "placement=zero", "collectives=true"],
            "placement zero .* holds shards of them by collectives: use collectives=false, or delay=none",
        ),
        (
            ["delay=prediction", "mode=dp", "placement=zero", "collectives=true", "workers=1", "replicas=2"],
            "holds shards of them by collectives: use collectives=false, or delay=none",
        ),
        (["delay=prediction", "mode=dp", "baseline=ddp"], "reads nothing late for delay=prediction .*: use delay=none"),
        (["optim=muon", "mode=dp", "baseline=fsdp2"], "optim=muon needs whole matrices, .*: use optim=adamw"),
        (["optim=muon", "mode=dp", "placement=zero", "collectives=true"], "optim=muon needs whole matrices"),
        (
            ["optim=muon", "mode=dp", "placement=zero", "collectives=true", "workers=1", "stages=2", "replicas=2"],
            "optim=muon needs whole matrices, .*: use collectives=false, or optim=adamw",
        ),
        (["optim.nesterov=true", "optim.momentum=0"], "optim.nesterov=true needs momentum"),
        (["optim.clip_norm=0"], "optim.clip_norm=0.0: must be a finite number above 0"),
        (["optim.clip_norm=1", "mode=dp", "baseline=ddp"], "use optim.clip_norm=null"),
        (["optim.clip_norm=1", "mode=dp", "placement=zero"], "optim.clip_norm with mode=dp .* or mode=cdp_v2"),
        (
            ["optim.clip_norm=1", "mode=chimera", "placement=pipeline", "ranks=4"],
            "use placement=single_device ranks=null, or mode=cdp_v2, which clips each stage by itself",
        ),
        (["dataset=text"], "dataset=text has tokens, which model=resnet8 cannot read: use model=gpt"),
        (["model=gpt"], "model=gpt reads tokens, not the images of dataset=digits: use dataset=text"),
        (["dataset=text", "model=gpt", "model.width=30"], "not divisible by model.heads=4: use model.width=32"),
        (["dataset=text", "model=gpt", "model.heads=0"], "model.heads=0: must be 1 or more"),
        (["dataset=text", "model=gpt", "dataset.tokens=words"], "dataset.tokens=words: choose bytes, characters"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_works(overrides, words):
    with pytest.raises(ConfigError, match=words):
        compose_config(overrides)


@pytest.mark.parametrize("placement", ["single_device", "replicated", "zero", "model_parallel", "pipeline"])
@pytest.mark.parametrize("delay", DELAYS)
def test_every_placement_that_holds_whole_stages_takes_every_method(placement, delay):
    config = compose_config([f"delay={delay}", f"placement={placement}", "optim=muon", "optim.clip_norm=1"])
    assert (config.mode.name, config.optim.clip_norm) == ("cdp_v2", 1)


def test_a_method_without_stale_reads_is_said_to_have_no_effect():
    said = without_effect(compose_config(["delay=compensation", "mode=dp"]))
    assert said == ["delay=compensation has no effect with mode=dp, which reads nothing late"]
    assert not without_effect(compose_config(["delay=error_feedback", "delay.strength=1", "mode=dp"]))
    assert not without_effect(compose_config(["delay=prediction"]))


@pytest.mark.parametrize("delay", ["compensation", "error_feedback"])
@pytest.mark.parametrize("mode", ["cdp_v1", "dp"])
def test_a_method_of_strength_0_is_said_to_have_no_effect(delay, mode):
    config = compose_config([f"delay={delay}", "delay.strength=0", f"mode={mode}"])
    assert delay_factory(config.delay)([1]).kept_steps == 0, "it is the optimizer's step, and no more"
    assert without_effect(config) == [f"delay={delay} has no effect with delay.strength=0, which corrects nothing"]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_steps_of_the_learning_rate_are_said_to_have_no_effect_with_another_schedule(schedule):
    steps = ["optim.step_epochs=3", "optim.gamma=0.5"]
    said = without_effect(compose_config([*steps, f"optim.schedule={schedule}"]))
    assert said == [
        f"{text} has no effect with optim.schedule={schedule}: it is of optim.schedule=step" for text in steps
    ]
    assert without_effect(compose_config([*steps, "optim.schedule=step"])) == []


def test_epochs_between_evaluations_that_are_not_reached():
    (said,) = without_effect(compose_config(["evaluate_every_epochs=3", "epochs=2"]))
    assert said == "evaluate_every_epochs=3 is not reached in epochs=2: only the last is evaluated"
    assert without_effect(compose_config(["evaluate_every_epochs=2", "epochs=2"])) == []


def test_steps_of_a_library_are_said_to_be_untraced():
    baseline = ["mode=dp", "baseline=ddp"]
    (said,) = without_effect(compose_config([*baseline, "traced_steps=3"]))
    assert said == "traced_steps=3 has no effect with baseline=ddp, whose actions are not recorded"
    assert Baseline.traced_until == 0
    for as_it_is in ([], ["traced_steps=0"]):
        assert without_effect(compose_config([*baseline, *as_it_is])) == []


def test_a_learning_rate_of_0_is_said_to_train_nothing():
    assert without_effect(compose_config(["optim.lr=0"])) == ["optim.lr=0 leaves all parameters as they are"]


def test_one_class_is_said_to_leave_nothing_to_learn():
    (said,) = without_effect(compose_config(["dataset=synthetic", "dataset.classes=1"]))
    assert said == "dataset.classes=1 leaves nothing to learn: every prediction is right"


@pytest.mark.parametrize(("placement", "has_effect"), [("pipeline", True), ("single_device", False)])
def test_the_schedule_of_pipelines_is_said_to_have_no_effect_elsewhere(placement: str, has_effect: bool) -> None:
    said = without_effect(compose_config(["mode=dp", f"placement={placement}", "pipeline_schedule=gpipe"]))
    assert said == [] if has_effect else "pipeline_schedule=gpipe has no effect" in said[0]


def test_the_schedule_of_pipelines_has_an_effect_with_whatever_mode_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "mine", MODES["dp"])
    config = compose_config(["mode=dp", "placement=pipeline", "pipeline_schedule=gpipe"])
    config.mode.name = "mine"
    assert without_effect(config) == []


def test_a_sequence_is_as_long_as_the_context():
    config = compose_config(["dataset=text", "model=gpt", "model.context=32"])
    assert config.input_shape == (32,) and config.dataset.classes == 256
    assert config.task.units(config.input_shape) == 32
    assert compose_config([]).input_shape == (1, 8, 8)


@pytest.mark.parametrize("given", [["price=true", "cluster.calibrate=true"], ["cluster.flops_per_second=1e12"]])
def test_what_only_a_plan_reads_is_told_beside_a_training(given):
    assert without_effect(compose_config(given)) == [
        "price=true and cluster.* have no effect on a training: give them to cdp-plan"
    ]
