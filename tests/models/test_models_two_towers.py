"""Two towers and a trunk: the same function as its parts by hand."""

from __future__ import annotations

import pytest
import torch

from cdp_repro.models import ModelError, ModelSpec, build_model
from cdp_repro.models.chain import cut, joined, segments
from cdp_repro.schedule.branches import two_towers


def towers(**sizes):
    return build_model(
        "two_towers", ModelSpec(**{"input_shape": (3, 8, 8), "classes": 10, "depth": 3, "width": 4, **sizes})
    )


def by_hand(model, images):
    blocks = dict(model.named_children())
    left, right = images, images
    for number in range(3):
        left, right = blocks[f"left{number}"](left), blocks[f"right{number}"](right)
    output = blocks["trunk0"](left, right)
    for name in ("trunk1", "trunk2", "head"):
        output = blocks[name](output)
    return output


def test_the_model_is_its_parts():
    model, images = towers().eval(), torch.randn(2, 3, 8, 8)
    assert segments(model) == [3, 3, 4]
    assert torch.equal(model(images), by_hand(model, images)) and model(images).shape == (2, 10)


def test_one_tower_sees_the_image_the_other_its_mirror_image():
    model, images = towers().eval(), torch.randn(2, 3, 8, 8)
    blocks = dict(model.named_children())
    blocks["right0"].load_state_dict(blocks["left0"].state_dict())
    mirrored = blocks["left0"](images.flip(-1))
    assert torch.equal(blocks["right0"](images), mirrored) and not torch.equal(blocks["left0"](images), mirrored)


@pytest.mark.parametrize("stages", [3, 6, 9])
def test_the_stages_of_a_cut_are_the_model(stages):
    model, images, third = towers().eval(), torch.randn(2, 3, 8, 8), stages // 3
    ends = {1: [3], 2: [1, 3], 3: [1, 2, 3]}[third]
    ranges = [
        range(start + before, start + end if end < 3 or start < 6 else 10)
        for start in (0, 3, 6)
        for before, end in zip([0, *ends], ends, strict=False)
    ]
    whole = joined(cut(model, ranges, two_towers(stages)), two_towers(stages))
    assert torch.equal(whole(images), model(images))


def test_tokens_are_refused():
    with pytest.raises(ModelError, match="two_towers reads images, not sequences of 16 tokens: use model=gpt"):
        towers(input_shape=(16,))
