"""Typed configuration: every leaf is read, every mistake is reported."""

from __future__ import annotations

import ast
import importlib.resources
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import cdp_repro
from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.config.compose import compose_config
from cdp_repro.config.keys import defaults, example_of, leaves, nested, settings_of
from cdp_repro.config.overrides import parse_long_forms
from cdp_repro.config.source import OURS
from cdp_repro.studies.rows import cell_hash

SOURCES = Path(cdp_repro.__file__).parent
CONFIGS = sorted(path for path in (SOURCES / "config" / "hydra_tree").rglob("*.yaml") if path.name != "config.yaml")


def field_names(kind: type) -> set[str]:
    """Names of all leaves of a configuration class."""
    found: set[str] = set()
    for field in fields(kind):
        nested = field.default_factory
        found |= field_names(nested) if is_dataclass(nested) else {field.name}
    return found


def names_read() -> set[str]:
    """Every attribute that code outside config.py reads, and those that config.py reads of itself."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        found |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return found


def test_every_field_is_read_by_code():
    recommended = {"recommended_epochs", "recommended_batch_size"}  # read by the interpolations of config.yaml
    assert field_names(RunConfig) - names_read() == recommended
    text = (SOURCES / "config" / "hydra_tree" / "config.yaml").read_text()
    assert all(f"${{dataset.{name}}}" in text for name in recommended)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_leaf_of_every_config_is_a_field(path):
    group = path.relative_to(SOURCES / "config" / "hydra_tree").parts[0]
    tree = OmegaConf.load(path)
    tree.pop("defaults", None)
    tree = tree if group == "experiment" else OmegaConf.create({group: tree})
    composed = OmegaConf.structured(RunConfig)
    known = {key for key, _ in leaves(composed)}
    assert {key for key, _ in leaves(tree)} <= known


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.parent.name == "model"], ids=lambda path: path.stem)
def test_every_model_takes_weights(path):
    assert "weights" in OmegaConf.load(path)


def test_the_configs_are_package_data_and_the_link_at_the_top_shows_them():
    assert importlib.resources.files("cdp_repro.config.hydra_tree").joinpath("config.yaml").is_file()
    link = Path(__file__).parents[2] / "configs"
    assert link.resolve() == (SOURCES / "config" / "hydra_tree").resolve()


def test_plain_data_round_trips():
    config = compose_config(["mode=[[1,1],[1,0]]", "workers=2", "dataset=cifar10", "optim=adamw"])
    assert load_config(OmegaConf.create(config.to_dict())) == config


@pytest.mark.parametrize("name", ["cifar10", "imagenet"])
def test_processes_that_decode_image_files_may_be_chosen_and_make_no_other_cell(name):
    usual, chosen = (compose_config([f"dataset={name}", *more]) for more in ([], ["dataset.loader_workers=1"]))
    assert chosen.dataset.loader_workers == 1 < usual.dataset.loader_workers
    assert cell_hash(settings_of(chosen.to_dict())) == cell_hash(settings_of(usual.to_dict()))


PAPER = {
    "cifar10_resnet18": ("cifar10", "resnet18", 101, 64 * 8, 0.05, 0.9, 5e-4, 30, 0.2),
    "cifar10_resnet50": ("cifar10", "resnet50", 101, 64 * 8, 0.05, 0.9, 1e-3, 30, 0.2),
    "imagenet_resnet18": ("imagenet", "resnet18", 91, 32 * 8, 0.1, 0.9, 1e-4, 30, 0.1),
    "imagenet_resnet50": ("imagenet", "resnet50", 91, 32 * 8, 0.1, 0.9, 1e-4, 30, 0.1),
}


@pytest.mark.parametrize("name", PAPER)
def test_presets_hold_the_set_up_of_the_paper(name):
    config = compose_config([f"experiment=paper/{name}", "mode=cdp_v1", "seed=3"])
    optim = config.optim
    found = (
        config.dataset.name, config.model.name, config.epochs, config.batch_size, optim.lr, optim.momentum,
        optim.weight_decay, optim.step_epochs, optim.gamma,
    )  # fmt: skip
    assert found == PAPER[name]
    assert (optim.name, optim.schedule, optim.warmup_epochs) == ("sgd", "step", 0)
    assert (config.workers, config.stage_count, config.partition) == (4, 4, "flops")
    assert (config.mode.name, config.seed) == ("cdp_v1", 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size=30"], "batch_size=30 is not divisible by workers=4: use batch_size=28 or batch_size=32"),
        (
            ["batch_size=30", "workers=2", "accumulate=2", "replicas=2"],
            "batch_size=30 is not divisible by workers=2 x accumulate=2 x replicas=2: use batch_size=24 or "
            "batch_size=32",
        ),
        (
            ["batch_size=6", "accumulate=2"],
            "batch_size=6 is not divisible by workers=4 x accumulate=2: use batch_size=8",
        ),
        (["accumulate=0"], "accumulate=0: must be 1 or more"),
        (["ranks=0", "placement=pipeline"], "ranks=0: must be 1 or more"),
        (["ranks=2", "placement=zero"], "ranks=2 is for placement=pipeline; placement=zero derives its ranks from"),
        (["ranks=3", "placement=pipeline"], "ranks=3 does not divide stages=4: use ranks=4"),
        (
            ["baseline=ddp", "mode=dp", "workers=2", "accumulate=2"],
            "baseline=ddp knows no accumulate=2: use workers=4 accumulate=1",
        ),
        (["stages=6"], "stages=6 is not a multiple of workers=4: use stages=4 or stages=8"),
        (["stages=2"], "stages=2 is not a multiple of workers=4: use stages=4"),
        (["workers=0"], "workers=0: must be 1 or more"),
        (["optim.lr=-1"], "optim.lr=-1.0: must be a finite number, 0 or more"),
        (["optim.lr=nan"], "optim.lr=nan: must be a finite number, 0 or more"),
        (
            ["optim.beta1=0.5"],
            "optim.beta1 has no effect with this optim; those that have are optim.lr, optim.momentum",
        ),
        (["optim.name=adamw"], "optim.name is set by optim=..."),
        (["mode=dp,cdp_v1"], "mode=dp,cdp_v1 has several values: add --multirun"),
        (["resume=runs/x"], "resume=RUN_DIRECTORY is for cdp-train, without + before it"),
        (["seed=99999999999999999999"], "seed"),
        (["mode=CDP_V1"], "did you mean 'cdp_v1'?"),
        (["dataset=synthetic", "dataset.test_samples=0"], "dataset.test_samples=0: must be 1 or more"),
        (["optim=adamw", "optim.beta1=1"], "optim.beta1=1.0: must be at least 0 and below 1"),
        (["epochs=two"], "epochs=two: Value 'two' could not be converted to Integer"),
        (["optim.lr=[0.1]"], "optim.lr=[0.1]: Value '[0.1]' could not be converted to Float; use e.g. optim.lr=0.1"),
        (["optim.lr=1e308"], "optim.lr=1e+308: must be at most 1e+38, beyond which fp32 ends"),
        (["optim.weight_decay=1e300"], "optim.weight_decay=1e+300: must be at most 1e+38, beyond which fp32 ends"),
        (["delay=error_feedback", "delay.strength=1e39"], "delay.strength=1e+39: must be at most 1e+38"),
        (
            ["optim.schedule=step", "optim.step_epochs=2", "optim.gamma=1e20", "epochs=5"],
            "optim.gamma=1e+20 multiplies optim.lr=0.1 2 times in epochs=5, beyond 1e+38, where fp32 ends: use at "
            "most optim.gamma=9.9e+18",
        ),
        (["optim.lr='${nope}'"], "optim.lr: the configuration cannot be resolved: Interpolation key 'nope' not found"),
        (["mode=ssp", "workers=2", "speeds=[1,${nope}]"], "speeds[1]: the configuration cannot be resolved: Interpol"),
        (["mode=[[1,${nope}],[1,0]]", "workers=2"], "mode.staleness[0][1]: the configuration cannot be resolved: In"),
        (["learning_rate=0.1"], "unknown key 'learning_rate'; did you mean 'optim.lr'?"),
        (["cluster.latency_seconds=1e300"], "cluster.latency_seconds=1e+300: must be at most 1e+09"),
        (["cluster.flops_per_second=1e300"], "cluster.flops_per_second=1e+300: must be at most 1e+24"),
        (
            ["price=true", "cluster.forward_seconds=[1e300,1,1,1]"],
            "cluster.forward_seconds=[1e+300, 1.0, 1.0, 1.0]: must be 4 finite numbers, from 0 to 1e+09, one a stage",
        ),
        (["mode=ssp", "placement=pipeline", "stages=2"], "mode=ssp is not for placement=pipeline: use placement="),
        (["lr=0.1"], "unknown key 'lr'; did you mean 'optim.lr'?"),
        (["modle=mlp"], "unknown key 'modle'; did you mean 'model'?"),
        (["grad_clip=1"], "unknown key 'grad_clip'; did you mean 'optim.clip_norm'?"),
        (["optim.learning_rate=0.1"], "unknown key 'optim.learning_rate'; did you mean 'optim.lr'?"),
        (["mode=[[1,1],[1,0]"], "is not of the form key=value: close its brackets and quotes"),
        (["workers"], "'workers' is not of the form key=value, such as workers=4"),
        (["mode=dp", "baseline=ddp", "placement=single_device"], "drop placement=single_device"),
        (["precision=fp16"], "precision=fp16: choose fp32, fp64, bf16"),
        (["partition=flop"], "did you mean 'flops'?"),
        (["slot_order=backwards"], "slot_order"),
        (["mode=matrix"], "mode.staleness has no value yet: give one, e.g. mode='[[1,1],[1,0]]' workers=2"),
        (["dataset=installed"], "dataset.name has no value yet: give one, e.g. dataset.name=my_data"),
        (["model=timm"], "model.name has no value yet: give one, e.g. model.name=resnet50"),
        (
            ["mode=dp", "mode.staleness=[[1]]"],
            "mode.staleness has no effect with this mode, which has no values of its own: leave it out, or give mode=",
        ),
        (["workers=two"], "could not be converted to Integer; use e.g. workers=4"),
        (["stages=two"], "could not be converted to Integer; use e.g. stages=4"),
        (["batch_size=1e23"], "could not be converted to Integer; use e.g. batch_size=64"),
        (
            ["dataset.image_size=100000"],
            "batch_size=64 samples of 1x100000x100000 are 640,000,000,000 values, more than",
        ),
        (["dataset.image_size=32"], "dataset.image_size=32, but that of digits is 8: use dataset.image_size=8"),
        (["dataset=imagenet", "dataset.channels=1"], "that of imagenet is 3: use dataset.channels=3"),
        (["optim.momentum=2"], "optim.momentum=2.0: must be at least 0 and below 1"),
        (["model=mlp", "model.depth=100000"], "model.depth=100000: must be at most 1000"),
        (["timeout_seconds=99999999999"], "timeout_seconds=99999999999: must be at most 2147483647"),
        ([f"batch_size={10**23}"], "batch_size=100000000000000000000000: must be at most 2147483647"),
        (["restart=true"], "restart=true needs resume=RUN_DIRECTORY beside it"),
        (["mode=[[1,1],[1,1]]"], "needs 4 rows (micro-batches) of 4 entries (stages)"),
        (["mode=[[0,0],[0,0]]", "workers=2"], "it exists from slot 6 on"),
        (
            ["mode=cdp_v3"],
            "unknown mode 'cdp_v3': choose accumulation, ampnet, async, cdp_v1, cdp_v2, chimera, dp, gpipe, "
            "interleaved, naive, one_f_one_b, pipedream, pipedream_2bw, ssp, terapipe, zero_bubble; did you "
            "mean 'cdp_v2'?",
        ),
        (
            ["mode=async", "speeds=[1,1,1,2]"],
            "use batch_size=60 or batch_size=65; 80 gives each as many samples as mode=dp with 64",
        ),
        (
            ["mode=async", "speeds=[1,2]"],
            "speeds=[1, 2] are of 2 workers, workers=4: give one each, such as speeds=[1, 2, 1, 1]",
        ),
        (["mode=ssp", "speeds=[1,1,0,2]"], "use integers from 1 whose least common multiple is at most 60"),
        (["mode=ssp", "speeds=[7,9,11,2]"], "such as speeds=[1, 1, 1, 2]"),
        (["mode=ssp", "message_time=0.1234"], "at most 60 for a micro-batch, such as message_time=1"),
        (["mode=async", "message_time=11"], "message_time=11.0: use a number from 0 to 10"),
        (["mode=dp", "message_time=1"], "message_time=1.0 is for mode=ssp or async; mode=dp has none"),
        (["mode=async", "slack=2"], "slack=2 is for mode=ssp; mode=async has none: leave slack out"),
        (
            ["placement=replicated", "micro_batches=6"],
            "micro_batches=6 is for modes on placement=single_device or pipeline with one update after them, not for "
            "mode=cdp_v2 on placement=replicated: leave it out",
        ),
        (
            ["mode=dp", "speeds=[1,1,1,2]", "micro_batches=6"],
            "not for mode=dp on placement=single_device with speeds=[1, 1, 1, 2]: leave it out",
        ),
        (["mode=pipedream", "placement=pipeline", "micro_batches=6"], "not for mode=pipedream on placement=pipeline"),
        (["micro_batches=6", "accumulate=2"], "micro_batches=6 and accumulate=2 both say how many: leave one out"),
        (["micro_batches=3"], "micro_batches=3 for workers=4, which all have one or more: use micro_batches=4"),
        (
            ["micro_batches=6", "batch_size=64"],
            "batch_size=64 is not divisible by micro_batches=6: use batch_size=60 or",
        ),
        (
            ["mode=dp", "baseline=ddp", "micro_batches=6"],
            "baseline=ddp knows no micro_batches=6: use workers=6 micro_batches=null",
        ),
        (["mode=dp", "baseline=torch_1f1b", "pipeline_schedule=gpipe"], "loop, without pipeline_schedule=gpipe: leave"),
        (["mode=dp", "baseline=ddp", "speeds=[1,1,1,2]"], "without speeds=[1, 1, 1, 2]: leave speeds out"),
        (["mode=dp", "baseline=ddp", "program=file"], "own loop, without program=file: leave program out"),
        (["mode=dp", "baseline=ddp", "slot_order=backward_first"], "leave slot_order out"),
        (["mode=gpipe", "slices=2"], "slices=2 is for mode=terapipe; mode=gpipe has none: leave slices out"),
        (
            ["mode=terapipe"],
            "mode=terapipe cuts sequences along their tokens, which dataset=digits has not: use dataset",
        ),
        (
            ["mode=terapipe", "dataset=text", "model=gpt", "model.context=20", "slices=3"],
            "model.context=20 is not divisible by slices=3: use slices=2",
        ),
        (["mode=ssp", "slack=-1"], "slack=-1: must be 0 or more"),
        (["mode=ssp", "speeds=[1,1,1,2]", "slack=100000"], "do not stand alike again within 20000 pushes"),
        (["mode=dp", "jitter=2"], "jitter=2 is for mode=ssp or async; mode=dp has none"),
        (["mode=cdp_v1", "speeds=[1,1,1,2]"], "speeds=[1, 1, 1, 2] is for mode=dp or ssp or async"),
        (["mode=dp", "speeds=[1,1,1,2]", "placement=zero"], "use placement=single_device or parameter_server"),
        (["mode=async", "placement=pipeline"], "mode=async is not for placement=pipeline: use placement=single_device"),
        (["mode=async", "replicas=2", "batch_size=64"], "replicas=2: workers with speeds of their own have none"),
        (["mode=async", "accumulate=2"], "mode=async makes an update after each micro-batch"),
        (["mode=async", "delay=error_feedback"], "counts training steps, but mode=async makes 4 updates in each"),
        (["dataset=cifar"], "did you mean 'cifar10'?"),
        (["model=resnet19"], "did you mean 'resnet18'?"),
        (["experiment=paper/cifar10_resnet1"], "did you mean 'paper/cifar10_resnet18'?"),
        (["optm.lr=1"], "unknown key 'optm.lr'; did you mean 'optim.lr'?"),
        (["~dataset"], "~dataset: every run has one: choose cifar10, digits"),
        (["~dataset=digits"], "~dataset=digits: every run has one"),
        (["optim=null"], "optim=null: every run has one: choose adamw"),
        (["experiment=null"], "experiment=null chooses nothing: use ~experiment"),
        (["hydra.verbose=true"], "hydra.verbose has no effect"),
        (["seed"], "not of the form key=value"),
    ],
)
def test_each_mistake_is_explained(overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", defaults())
def test_the_example_of_a_setting_is_a_value_of_its_type(key):
    """Messages suggest it; a setting that is unset unless chosen needs one of its own, as `=None` is text."""
    example = shlex.split(example_of(key))
    (own,) = (form for form in parse_long_forms(example, OURS) if form.key_or_group == key)
    assert own.value() != "None"
    OmegaConf.merge(OmegaConf.structured(RunConfig), nested(key, own.value()))


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        compose_config(["mode=cdp_v3", "datset=cifar10", "optim.lr=abc", "workers=3", "precision=fp8", "epochs=0"])
    assert len(caught.value.problems) == 6


def test_all_mistakes_of_a_schedule_are_reported_at_once():
    sizes = {"ranks": 7, "servers": 3, "speeds": "[1]", "slack": 2, "slices": 2, "accumulate": 3, "micro_batches": 2}
    with pytest.raises(ConfigError) as refusal:
        compose_config(["mode=pipedream", "placement=zero", *(f"{name}={value}" for name, value in sizes.items())])
    problems = refusal.value.problems
    assert len(problems) == 8 and "mode=pipedream is not for placement=zero" in str(refusal.value)
    assert all(f"{name}={value}" in str(refusal.value) for name, value in sizes.items())


@pytest.mark.parametrize(
    "schedule", ["workers=0", "workers=two", "mode=dpp", "workers=100000", "mode=async speeds=[1,2]", "stages=6"]
)
def test_a_mistake_in_the_schedule_hides_none_elsewhere(schedule):
    others = {
        "optim.momentum=0 optim.nesterov=true": "optim.nesterov=true needs momentum",
        "dataset.image_size=100000": "dataset.image_size=100000, but that of digits is 8",
        "model=gpt model.width=30": "model.width=30 is not divisible by model.heads=4",
        "delay=prediction": "delay=prediction expects the next step to be like the last",
    }
    with pytest.raises(ConfigError) as caught:
        compose_config([*schedule.split(), *" ".join(others).split()])
    assert all(said in str(caught.value) for said in others.values())
    with pytest.raises(ConfigError) as alone:
        compose_config(schedule.split())
    assert {*alone.value.problems} < {*caught.value.problems}


def test_a_mini_batch_that_is_too_large_hides_no_mistake_in_the_schedule():
    with pytest.raises(ConfigError) as caught:
        compose_config(["dataset=synthetic", "dataset.image_size=100000", "stages=6"])
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["batch_size=64", "stages=6"]


def test_short_forms_are_written_out():
    config = compose_config(["mode=[[1,1],[1,0]]", "workers=2", "model=deit_tiny_patch16_224"])
    assert (config.mode.name, config.mode.staleness) == ("matrix", [[1, 1], [1, 0]])
    assert config.spec().mode == ((1, 1), (1, 0))
    assert config.model.name == "deit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=100000"], "use numbers whose product is at most 333,333"),
        (["accumulate=1000000000"], "use numbers whose product is at most 333,333"),
        (["stages=1000000"], "use numbers whose product is at most 333,333"),
        (
            ["mode=gpipe", "placement=pipeline", "micro_batches=200000", "batch_size=200000"],
            "micro_batches=200000, replicas=1, stages=4 and a staleness",
        ),
        (
            ["mode=terapipe", "placement=pipeline", "dataset=text", "model=gpt", "accumulate=1000", "slices=128"],
            "e.g. workers=4 accumulate=1 replicas=1 slices=2 stages=4",
        ),
        (["mode=pipedream", "workers=700"], "use numbers whose product is at most 333,333"),
        (["mode=[[1000000,1],[1,1]]", "workers=2"], "use a staleness of at most 249998"),
        (
            ["mode=[[1,1],[1,1]]", "workers=300"],
            "300 rows (micro-batches) of 300 entries (stages); got 2 rows of [2, 2]",
        ),
    ],
)
def test_what_would_take_for_ever_is_refused_before_it_is_made(overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("overrides", [["workers=500", "batch_size=500"], ["accumulate=20000", "batch_size=80000"]])
def test_what_takes_a_minute_is_not(overrides):
    assert compose_config(overrides).workers in (4, 500)
