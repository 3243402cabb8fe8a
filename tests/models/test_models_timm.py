"""timm models: the same function as timm's own, or a refusal that says why."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from cdp_repro.models import ModelError, build_model
from cdp_repro.models.spec import ModelSpec
from cdp_repro.models.timm_models import WORKING_EXAMPLES, _check_same_function, _run_blocks

FAMILIES = [
    ("test_vit", 32),
    ("test_vit3", 32),
    ("deit_tiny_distilled_patch16_224", 32),
    ("test_efficientnet", 32),
    ("mobilenetv3_small_050", 64),
    ("gmixer_12_224", 32),
]


def timm_name(key, blocks):
    """embed.part.x -> x; blocks_0_1.x -> blocks.0.1.x; head.part.x -> x."""
    block, rest = key.split(".", 1)
    return f"{block.replace('_', '.')}.{rest}" if block in blocks else rest.removeprefix("part.")


@pytest.mark.parametrize(("name", "side"), FAMILIES)
def test_training_equals_timms_own_model(name, side):
    ours = build_model(name, ModelSpec(input_shape=(3, side, side), classes=5)).double()
    options = {} if name in ("test_efficientnet", "mobilenetv3_small_050") else {"img_size": side}
    theirs = timm.create_model(name, pretrained=False, num_classes=5, **options).double()
    names = {key: timm_name(key, dict(ours.named_children()).keys() - {"embed", "head"}) for key in ours.state_dict()}
    assert set(names.values()) == set(theirs.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    theirs.load_state_dict({names[key]: value for key, value in ours.state_dict().items()})

    images = torch.randn(3, 3, side, side, generator=generator).double()
    outputs = ours(images), theirs(images)
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, gradients[names[key]]), key
        assert parameter.grad.any(), key


def test_nested_blocks_are_cut_apart():
    model = build_model("mobilenetv3_small_050", ModelSpec(input_shape=(3, 32, 32), classes=10))
    names = [key for key, _ in model.named_children()]
    assert names[:4] == ["embed", "blocks_0_0", "blocks_1_0", "blocks_1_1"]


def test_image_size_and_channels_are_passed_on():
    model = build_model("test_vit", ModelSpec(input_shape=(1, 48, 32), classes=10))
    assert model.embed.part.patch_embed.grid_size == (3, 2)
    assert model.embed.part.patch_embed.proj.in_channels == 1


def test_dropout_is_passed_on():
    model = build_model("test_vit", ModelSpec(input_shape=(3, 32, 32), classes=10, dropout=0.3))
    rates = {key: module.p for key, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert rates["head.part.head_drop"] == 0.3
    assert rates["blocks_0.attn.proj_drop"] == 0.3
    assert (
        build_model(
            "test_efficientnet", ModelSpec(input_shape=(3, 32, 32), classes=10, dropout=0.3)
        ).head.part.drop_rate
        == 0.3
    )


def test_check_leaves_batch_statistics_alone():
    model = build_model("test_efficientnet", ModelSpec(input_shape=(3, 32, 32), classes=10))
    for key, buffer in model.named_buffers():
        expected = 1.0 if key.endswith("running_var") else 0.0
        assert (buffer == expected).all(), key


@pytest.mark.parametrize("name", ["resnet18d", "convnext_atto"])
def test_without_blocks_is_refused(name):
    with pytest.raises(ModelError, match=f"'{name}' cannot be cut .*it has no `blocks`.*{WORKING_EXAMPLES[0]}"):
        build_model(name, ModelSpec(input_shape=(3, 32, 32), classes=10))


def test_unknown_surroundings_are_refused():
    with pytest.raises(ModelError, match=r"'xcit_nano_12_p16_224' .*ViT needs _pos_embed.*models that work"):
        build_model("xcit_nano_12_p16_224", ModelSpec(input_shape=(3, 32, 32), classes=10))


def test_a_chain_that_lacks_a_step_is_refused():
    # GhostNet looks like MobileNetV3 from outside, but has an activation between bn1 and blocks.
    with pytest.raises(ModelError, match=r"'ghostnet_050' .*do not give what its own forward gives"):
        build_model("ghostnet_050", ModelSpec(input_shape=(3, 64, 64), classes=10))


def test_blocks_that_need_more_than_the_input_are_refused():
    # EVA's position embedding gives its blocks a second input.
    with pytest.raises(ModelError, match=r"'eva02_tiny_patch14_224' cannot be cut .*Error"):
        build_model("eva02_tiny_patch14_224", ModelSpec(input_shape=(3, 28, 28), classes=10))


@pytest.mark.parametrize("side", [8, 28, 40])
def test_patches_that_do_not_tile_are_refused(side):
    fits = max(16, side - side % 16)
    with pytest.raises(ModelError, match=rf"16x16 px, which do not tile {side}x{side} px: use {fits}x{fits} px"):
        build_model("test_vit", ModelSpec(input_shape=(3, side, side), classes=10))


def small_spec():
    return ModelSpec(input_shape=(1, 4, 4), classes=2)


def zero_headed(*blocks):
    """A model whose head starts at zero, as timm's mixers do: whatever the blocks do, its output is zero."""
    head = nn.Linear(16, 2)
    nn.init.zeros_(head.weight)
    return nn.Sequential(*blocks, nn.Flatten(), head)


def test_check_sees_through_a_zero_head():
    first, second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 1)
    model = zero_headed(first, second)
    _check_same_function(model, nn.Sequential(*model), small_spec(), "same")
    swapped = nn.Sequential(second, first, *list(model)[2:])
    with pytest.raises(ModelError, match=r"'swapped' .*do not give"):
        _check_same_function(model, swapped, small_spec(), "swapped")


def test_check_sees_lost_parameters():
    model = zero_headed(nn.Conv2d(1, 1, 1))
    with pytest.raises(ModelError, match="loses parameters"):
        _check_same_function(model, model[1:], small_spec(), "lossy")


def test_check_sees_a_block_that_writes_to_its_input():
    model = zero_headed(nn.Conv2d(1, 1, 1), nn.ReLU(inplace=True))
    with pytest.raises(ModelError, match="block 1 starts with an in-place operation"):
        _check_same_function(model, model, small_spec(), "inplace")


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet20", "resnet18"])
def test_no_builtin_block_writes_to_its_input(name):
    model = build_model(name, ModelSpec(input_shape=(3, 8, 8), classes=10))
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    with torch.no_grad():
        _run_blocks(model, parameters, torch.zeros(2, 3, 8, 8))  # raises where a block does
