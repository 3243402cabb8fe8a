"""The decoder: what it computes, how it is drawn, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cdp_repro.models import ModelError, ModelSpec, build_model, cut
from cdp_repro.models.causal import CausalLayer

SIZES = {"input_shape": (12,), "classes": 20, "width": 16, "depth": 3, "heads": 4}


def gpt(**changed):
    return build_model("gpt", ModelSpec(**{**SIZES, **changed})).double()


def tokens(batch=2, length=12):
    return torch.randint(20, (batch, length), generator=torch.Generator().manual_seed(0))


def by_hand(model, numbers):
    """The formulas, token by token and head by head."""
    embed, *blocks, head = model
    x = embed.token.weight[numbers] + embed.position.weight[: numbers.shape[1]]
    for block in blocks:
        normed = F.layer_norm(x, (16,), block.norm1.weight, block.norm1.bias)
        qkv = normed @ block.attention.query_key_value.weight.T + block.attention.query_key_value.bias
        mixed = torch.zeros_like(x)
        for h in range(4):
            q, k, v = (qkv[..., part * 16 + 4 * h : part * 16 + 4 * h + 4] for part in range(3))
            for t in range(x.shape[1]):
                scores = (k[:, : t + 1] @ q[:, t, :, None]).squeeze(-1) / math.sqrt(4)
                mixed[:, t, 4 * h : 4 * h + 4] = (scores.softmax(-1)[..., None] * v[:, : t + 1]).sum(1)
        x = x + mixed @ block.attention.out.weight.T + block.attention.out.bias
        normed = F.layer_norm(x, (16,), block.norm2.weight, block.norm2.bias)
        inner = F.gelu(normed @ block.feed_forward.inner.weight.T + block.feed_forward.inner.bias)
        x = x + inner @ block.feed_forward.out.weight.T + block.feed_forward.out.bias
    return F.layer_norm(x, (16,), head.norm.weight, head.norm.bias) @ head.logits.weight.T


def test_it_computes_a_pre_norm_decoder():
    model = gpt()
    for parameter in model.parameters():  # biases are drawn as 0
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    torch.testing.assert_close(model(tokens()), by_hand(model, tokens()))


def test_a_token_sees_only_those_before_it():
    model, first = gpt(), tokens()
    changed = first.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 20
    one, other = model(first), model(changed)
    assert torch.equal(one[:, :7], other[:, :7]) and not torch.equal(one[:, 7:], other[:, 7:])


@pytest.mark.parametrize("slices", [1, 2, 3, 12])
def test_slices_of_a_sequence_see_the_tokens_before_them(slices):
    model = gpt()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, CausalLayer)}
    assert len(layers) == 4, "the embedding, which knows places, and three attentions"
    kept, found = {}, []
    for number, part in enumerate(tokens().chunk(slices, 1)):
        for name, layer in layers.items():
            layer.start, layer.keeps, layer.past = number * 12 // slices, True, kept.get(name)
        found.append(model(part))
        kept = {name: layer.present for name, layer in layers.items()}
    torch.testing.assert_close(torch.cat(found, 1), gpt()(tokens()), rtol=0, atol=1e-12)


def test_it_can_be_cut_between_any_two_blocks():
    model = gpt()
    assert [name for name, _ in model.named_children()] == ["embed", "block0", "block1", "block2", "head"]
    x = tokens()
    for stage in cut(model, [range(1), range(1, 3), range(3, 5)]):
        x = stage(x)
    assert torch.equal(x, model(tokens())) and x.shape == (2, 12, 20)


def test_shorter_sequences_and_dropout():
    assert gpt()(tokens(length=5)).shape == (2, 5, 20)
    model = gpt(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(model.eval()(tokens()), model(tokens()))


def test_weights_are_drawn_as_said():
    model = build_model("gpt", ModelSpec(input_shape=(64,), classes=256, width=128, depth=8, heads=4))
    drawn = dict(model.named_parameters())
    assert drawn["embed.token.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert drawn["block3.attention.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not drawn["block3.feed_forward.out.bias"].any() and (drawn["head.norm.weight"] == 1).all()
    with torch.no_grad():
        logits = model(torch.randint(256, (4, 64)))
    assert F.cross_entropy(logits.flatten(0, 1), torch.randint(256, (256,))).item() == pytest.approx(
        math.log(256), abs=0.1
    )


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("gpt", {"input_shape": (3, 8, 8)}, "gpt reads tokens, not images of .3, 8, 8.: use dataset=text"),
        ("gpt", {"width": 18}, "width=18 is not divisible by heads=4: use width=16"),
        ("resnet8", {}, "resnet8 reads images, not sequences of 12 tokens: use model=gpt"),
        ("gpt", {"heads": 0}, "heads=0 is too small"),
    ],
)
def test_refusals(name, changed, words):
    with pytest.raises(ModelError, match=words):
        build_model(name, ModelSpec(**{**SIZES, **changed}))
