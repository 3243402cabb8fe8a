"""Weights out and in: plain torchvision, timm and transformers code loads them, and computes what was measured."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

from cdp_repro.cli import export as export_command
from cdp_repro.cli import train as train_command
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.numerics import loss_fn
from cdp_repro.models import ModelSpec
from cdp_repro.models.registry import build_model, original_tensors
from cdp_repro.observe.run_directory import RunDirectoryError
from cdp_repro.predict.cutting import cut_model
from cdp_repro.training import weights
from cdp_repro.training.assembly import load_data
from cdp_repro.training.checkpoint import CheckpointError, CheckpointStore
from cdp_repro.training.equivalence import verify
from cdp_repro.training.run import train
from cdp_repro.training.weights import export, start_from_file

IMAGES = ("dataset=synthetic", "dataset.image_size=32", "dataset.train_samples=16", "dataset.test_samples=8")
GPT = ("dataset=text", "model=gpt", "model.width=16", "model.depth=2", "model.heads=2", "model.context=16", "workers=2",
       "batch_size=8", "epochs=1", "wandb=disabled", "traced_steps=0")  # fmt: skip
SMALL = (*IMAGES, "batch_size=8", "workers=2", "epochs=1", "wandb=disabled", "traced_steps=0")


def torchvision_resnet18(classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images, as anyone would write it."""
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def plain_gpt(tokens: int) -> nn.Module:
    """The decoder of `GPT`, as anyone would write it with transformers."""
    import transformers  # here: it takes seconds, and every process that runs tests reads this file

    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=tokens, **sizes, activation_function="gelu", tie_word_embeddings=False)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_the_newest_version_goes_out_where_a_step_has_several_updates(tmp_path, mode):
    config = compose_config(["dataset=digits", "model=mlp", f"mode={mode}", "workers=2", "speeds=[1,2]",
                             "batch_size=66", "epochs=1", "wandb=disabled", "traced_steps=0"])  # fmt: skip
    train(config, tmp_path / "run", ["test"])
    export(tmp_path / "run", tmp_path / "weights.pt")
    stages = CheckpointStore(tmp_path / "run" / "checkpoints").load().tensors["engine"]["stages"]
    newest = {name: tensor for stage in stages for name, tensor in stage["versions"][max(stage["versions"])].items()}
    found = torch.load(tmp_path / "weights.pt")
    assert found.keys() == newest.keys()
    assert all(torch.equal(found[name], newest[name]) for name in found)


class Doubled(nn.Module):
    """Two layers with one weight, a layer in two places, a buffer that is not stored, and a state that is no tensor."""

    def __init__(self, width):
        super().__init__()
        self.first, self.tied = nn.Linear(64, width, bias=False), nn.Linear(64, width, bias=False)
        self.tied.weight = self.first.weight
        self.layer = nn.Linear(width, width)
        self.again = self.layer
        self.register_buffer("ones", torch.ones(width), persistent=False)

    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass

    def forward(self, x):
        x = (self.first(x.flatten(1)) + self.tied(x.flatten(1))).tanh() + self.ones
        return self.again(self.layer(x).tanh())


def doubled(spec):
    """The model of a package whose code reads values while it builds."""
    width = int(torch.linspace(8, 16, 2)[0].item())
    return nn.Sequential(Doubled(width), nn.Linear(width, spec.classes))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_model_of_a_package_goes_out_and_in_with_all_its_names(tmp_path, monkeypatch, mine, suffix):
    config = mine(doubled, "dataset=digits", "batch_size=64", "epochs=1", "wandb=disabled")
    train(config, tmp_path / "run", ["test"])
    checkpoint = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    file = tmp_path / f"weights{suffix}"
    monkeypatch.setattr(weights, "load_config", lambda *_, **__: config)  # it does not know the model by its name
    export(tmp_path / "run", file)
    plain = doubled(ModelSpec((1, 8, 8), 10))
    left_out = plain.load_state_dict(load_file(file) if suffix == ".safetensors" else torch.load(file), strict=False)
    assert left_out == (["0._extra_state"], [])
    kept = checkpoint.tensors["engine"]["stages"][0]["versions"]
    assert torch.equal(plain[0].tied.weight, kept[max(kept)]["0.first.weight"])
    config.model.weights = str(file)
    weights.check_weights(config)
    stages = cut_model(config).stages
    assert start_from_file(config, stages)
    for name, tensor in nn.Sequential(*(block for stage in stages for block in stage)).named_parameters():
        assert torch.equal(tensor, plain.get_parameter(name)), name


def plain_vit() -> nn.Module:
    return timm.create_model("test_vit", num_classes=10, img_size=32)


@pytest.fixture(scope="module", params=["resnet18", "test_vit"])
def trained(request, tmp_path_factory):
    """(run directory, configuration, the original model without weights) of a run of two training steps."""
    folder = tmp_path_factory.mktemp("weights")
    config = compose_config([*SMALL, f"model={request.param}", "mode=cdp_v1"])
    train(config, folder / "run", ["test"])
    return folder / "run", config, {"resnet18": torchvision_resnet18, "test_vit": plain_vit}[request.param]()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_plain_code_loads_the_weights_and_measures_what_the_run_has_measured(trained, tmp_path, suffix):
    run_dir, config, plain = trained
    file = tmp_path / f"weights{suffix}"
    done = export(run_dir, file)
    found = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
    assert (done.step, done.tensors) == (2, len(found))
    plain.load_state_dict(found, strict=True)
    ((images, targets),) = load_data(config).test_batches(8, device=torch.device("cpu"))
    with torch.no_grad():
        loss = loss_fn(plain.eval()(images), targets).item()
    assert loss == pytest.approx(json.loads((run_dir / "summary.json").read_text())["eval/loss"], rel=1e-5)


def test_a_run_starts_from_a_file_of_plain_code(trained, tmp_path):
    _, config, plain = trained
    file = tmp_path / "plain.pt"
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 0.1 if tensor.is_floating_point() else tensor)
    torch.save(plain.state_dict(), file)
    started = compose_config([*SMALL, f"model={config.model.name}", f"model.weights={file}"])
    stages = cut_model(started).stages
    assert start_from_file(started, stages)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(nn.Sequential(*stages).eval()(images), plain.eval()(images))


def test_transformers_loads_the_decoder_and_a_run_starts_from_one_of_its_own(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("a quick brown fox jumps over a lazy dog. " * 40)
    gpt = (*GPT, f"dataset.root={words}")
    config = compose_config([*gpt])
    summary = train(config, tmp_path / "run", ["test"])
    export(tmp_path / "run", tmp_path / "gpt.safetensors")
    plain = plain_gpt(config.dataset.classes)
    plain.load_state_dict(load_file(tmp_path / "gpt.safetensors"), strict=True)
    loss, count = 0.0, 0
    for tokens, targets in load_data(config).test_batches(8, device=torch.device("cpu")):
        with torch.no_grad():
            logits = plain.eval()(tokens).logits
        loss += nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    assert loss / count == pytest.approx(summary["eval/nats_per_token"], rel=1e-5)

    fresh = plain_gpt(config.dataset.classes).eval()
    save_file(fresh.state_dict(), tmp_path / "fresh.safetensors")
    stages = cut_model(started := compose_config([*gpt, f"model.weights={tmp_path / 'fresh.safetensors'}"])).stages
    assert start_from_file(started, stages)
    with torch.no_grad():
        assert torch.allclose(nn.Sequential(*stages).eval()(tokens), fresh(tokens).logits, atol=1e-6)


def test_a_file_with_the_names_of_build_model_fits_too(tmp_path):
    with torch.device("meta"):
        shapes = build_model("gpt", ModelSpec(input_shape=(16,), classes=256, depth=2, width=16, heads=2)).state_dict()
    values = {key: torch.rand(tensor.shape) for key, tensor in shapes.items()}
    save_file(values, tmp_path / "ours.safetensors")
    config = compose_config([*GPT, f"model.weights={tmp_path / 'ours.safetensors'}"])
    assert config.dataset.classes == 256
    stages = cut_model(config).stages
    start_from_file(config, stages)
    found = {key: tensor for stage in stages for key, tensor in stage.state_dict().items()}
    assert found.keys() == values.keys() and all(torch.equal(found[key], values[key]) for key in values)


def test_a_run_that_learns_nothing_gives_back_the_parameters_it_started_from(tmp_path):
    plain = torchvision_resnet18()
    save_file(plain.state_dict(), tmp_path / "start.safetensors")
    still = ("optim.lr=0", "optim.weight_decay=0", f"model.weights={tmp_path / 'start.safetensors'}")
    train(compose_config([*SMALL, "model=resnet18", *still]), tmp_path / "run", ["test"])
    export(tmp_path / "run", tmp_path / "end.safetensors")
    end = load_file(tmp_path / "end.safetensors")
    for name, parameter in plain.named_parameters():
        assert torch.equal(end[name], parameter), name
    assert not torch.equal(end["bn1.running_mean"], plain.bn1.running_mean), "statistics are of the images"


def test_a_resumed_run_does_not_need_the_file_any_more(tmp_path, tiny):
    start = tmp_path / "start.pt"
    train(compose_config([*tiny]), tmp_path / "first", ["test"])
    export(tmp_path / "first", start)
    config = compose_config([*tiny, f"model.weights={start}", "checkpoint_every_steps=3", "keep_checkpoints=9"])
    whole = train(config, tmp_path / "run", ["test"])
    start.unlink()
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.name > "step-000000003":
            shutil.rmtree(path)
    assert train(config, tmp_path / "run", ["test"], resume=True)["eval/loss"] == whole["eval/loss"]


def test_every_rank_starts_from_the_file(tmp_path, tiny):
    train(compose_config([*tiny]), tmp_path / "first", ["test"])
    export(tmp_path / "first", tmp_path / "start.pt")
    weights = f"model.weights={tmp_path / 'start.pt'}"
    config = compose_config([*tiny, "workers=2", "placement=replicated", "precision=fp64", weights])
    assert verify(config, steps=2).agrees


@pytest.mark.parametrize(
    ("name", "shape", "original"),
    [
        ("resnet50", (3, 224, 224), lambda: torchvision.models.resnet50(num_classes=10)),
        ("vit_b_16", (3, 224, 224), lambda: timm.create_model("vit_base_patch16_224", num_classes=10)),
        ("deit_tiny_distilled_patch16_224", (3, 224, 224),
         lambda: timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10)),
        ("test_efficientnet", (3, 32, 32), lambda: timm.create_model("test_efficientnet", num_classes=10)),
        ("mobilenetv3_small_050", (3, 64, 64), lambda: timm.create_model("mobilenetv3_small_050", num_classes=10)),
        ("gmixer_12_224", (3, 224, 224), lambda: timm.create_model("gmixer_12_224", num_classes=10)),
    ],
)  # fmt: skip
def test_names_and_shapes_are_the_originals(name, shape, original):
    with torch.device("meta"):
        ours, theirs = build_model(name, ModelSpec(input_shape=shape, classes=10)).state_dict(), original().state_dict()
    assert {key: tensor.shape for key, tensor in original_tensors(name, ours).items()} == {
        key: tensor.shape for key, tensor in theirs.items()
    }


@pytest.mark.parametrize("name", ["resnet8", "resnet20"])
def test_the_small_resnets_load_by_the_names_that_they_would_have_in_torchvision(tmp_path, tiny, name):
    data = [override for override in tiny if not override.startswith("model")]
    assert train_command.main([*data, f"model={name}", "batch_size=16", "epochs=1", f"run_dir={tmp_path}/run"]) == 0
    assert export_command.main([f"{tmp_path}/run", f"{tmp_path}/weights.safetensors"]) == 0
    file = load_file(tmp_path / "weights.safetensors")
    model = build_model(name, ModelSpec(input_shape=(3, 8, 8), classes=10))
    views = original_tensors(name, model.state_dict())
    assert views.keys() == file.keys() and "layer1.0.conv1.weight" in views
    for each, values in views.items():
        values.copy_(file[each])
    assert torch.equal(dict(model.named_parameters())["stem.conv1.weight"], file["conv1.weight"])


def test_a_model_of_ours_keeps_its_names():
    with torch.device("meta"):
        ours = build_model("mlp", ModelSpec(input_shape=(3, 8, 8), classes=10))
    ours.load_state_dict(original_tensors("mlp", ours.state_dict()), strict=True)


def refused_start(tmp_path: Path, file: Path, model: str = "resnet18") -> str:
    """Start a run from a file that does not fit; return the message, after nothing was written."""
    config = compose_config([*SMALL, f"model={model}", f"model.weights={file}"])
    with pytest.raises(ConfigError) as refusal:
        train(config, tmp_path / "run", ["test"])
    assert not (tmp_path / "run").exists()
    return str(refusal.value)


def test_weights_of_another_model_are_refused_with_names_and_shapes(tmp_path):
    file = tmp_path / "w.pt"
    torch.save(torchvision_resnet18(classes=7).state_dict(), file)
    said = refused_start(tmp_path, file)
    assert "another model than model=resnet18 with 10 classes and images 3x32x32" in said
    assert "fc.weight is 7x512 there and 10x512 here, fc.bias is 7 there and 10 here" in said
    torch.save(torchvision.models.resnet34(num_classes=10).state_dict(), file)
    said = refused_start(tmp_path, file)
    assert "it has layer1.2.conv1.weight" in said and "conv1.weight is 64x3x7x7 there and 64x3x3x3 here" in said
    integers = {name: tensor.long() for name, tensor in torchvision_resnet18(classes=10).state_dict().items()}
    torch.save(integers, file)
    assert "conv1.weight is torch.int64 there and torch.float32 here" in refused_start(tmp_path, file)
    torch.save({"head": torch.zeros(2)}, file)
    assert "it lacks conv1.weight, bn1.weight, bn1.bias and 119 more; it has head" in refused_start(tmp_path, file)


def test_files_that_hold_no_weights_are_refused(tmp_path):
    assert "cannot be read: Is a directory" in refused_start(tmp_path, tmp_path, "mlp")
    for name, content in {
        "text.pt": b"hello", "text.safetensors": b"hello", "empty.pt": b"", "code.pt": pickle.dumps(Path("x")),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        said = refused_start(tmp_path, tmp_path / name, "mlp")
        assert f"{name} is not a file of weights: give a .safetensors file" in said
        assert "weights_only" not in said and "index" not in said, "no advice to load it unsafely, no words of a parser"
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    assert "holds no tensors by name" in refused_start(tmp_path, tmp_path / "numbers.pt", "mlp")


def test_a_file_that_is_not_there_is_told_with_the_other_mistakes_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"weights=none.pt cannot be read: there is no such file\n.*lr=-1"):
        compose_config(["model.weights=none.pt", "optim.lr=-1"])


def test_exports_that_cannot_be_made_write_nothing(tmp_path, tiny):
    run = tmp_path / "run"
    train(compose_config([*tiny]), run, ["test"])
    (tmp_path / "kept.pt").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"use weights\.safetensors or weights\.pt"):
        export(run, tmp_path / "weights.bin")
    with pytest.raises(ConfigError, match="cannot write"):
        export(run, tmp_path / "nowhere" / "weights.pt")
    with pytest.raises(ConfigError, match="cannot write"):
        export(run, tmp_path / "kept.pt" / "weights.pt")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        export(tmp_path / "none", tmp_path / "kept.pt")
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        export(run, tmp_path / "kept.pt")
    assert (tmp_path / "kept.pt").read_text() == "kept"
