"""A decoder for text: embeddings, pre-norm blocks, head.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3: layer norm before
attention and feed-forward, one more before the head, and weights that add to the residual stream drawn smaller by
1/sqrt(2 depth). Embedding and head do not share weights, because a parameter belongs to one stage.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdp_repro.models.causal import CausalLayer
from cdp_repro.models.spec import ModelError, ModelSpec

_DEVIATION = 0.02
"""Standard deviation of the initial weights."""


def build_gpt(spec: ModelSpec) -> nn.Sequential:
    """Return an embedding, `depth` blocks and a head, depth + 2 blocks in all: tokens [B, context] -> logits of each
    token's successor, [B, context, classes].

    Raises:
        ModelError: `spec` is for images, or `heads` does not divide `width`.
    """
    if len(spec.input_shape) != 1:
        raise ModelError(f"gpt reads tokens, not images of {spec.input_shape}: use dataset=text")
    if spec.width % spec.heads:
        works = max(1, round(spec.width / spec.heads)) * spec.heads
        raise ModelError(f"width={spec.width} is not divisible by heads={spec.heads}: use width={works}")
    blocks: OrderedDict[str, nn.Module] = OrderedDict(embed=Embedding(spec))
    blocks.update((f"block{number}", Block(spec)) for number in range(spec.depth))
    blocks["head"] = nn.Sequential(
        OrderedDict(norm=nn.LayerNorm(spec.width), logits=nn.Linear(spec.width, spec.classes, bias=False))
    )
    model = nn.Sequential(blocks)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            adds = name.endswith(("attention.out.weight", "feed_forward.out.weight"))
            nn.init.normal_(parameter, std=_DEVIATION / (math.sqrt(2 * spec.depth) if adds else 1))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


_TRANSFORMERS_NAMES = {
    "embed.token": "transformer.wte",
    "embed.position": "transformer.wpe",
    "norm1": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.inner": "mlp.c_fc",
    "feed_forward.out": "mlp.c_proj",
    "head.norm": "transformer.ln_f",
    "head.logits": "lm_head",
}


def transformers_name(key: str) -> str:
    """Return the name that one of our tensors has in GPT2LMHeadModel of transformers.

    `head.norm.bias` is `transformer.ln_f.bias` there, `block3.norm1.bias` is `transformer.h.3.ln_1.bias`.
    """
    module, _, tensor = key.rpartition(".")
    block, _, part = module.partition(".")
    if block.startswith("block"):
        return f"transformer.h.{block.removeprefix('block')}.{_TRANSFORMERS_NAMES[part]}.{tensor}"
    return f"{_TRANSFORMERS_NAMES[module]}.{tensor}"


def is_transposed_in_transformers(key: str) -> bool:
    """Return whether transformers stores the tensor transposed: its blocks' matrices are [inputs, outputs]."""
    return key.startswith("block") and key.endswith(".weight") and ".norm" not in key


class Embedding(CausalLayer):
    """Tokens [B, T] -> their vectors plus those of their positions, [B, T, width]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.classes, spec.width)
        self.position = nn.Embedding(spec.input_shape[0], spec.width)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors."""
        positions = self.position.weight[self.start : self.start + tokens.shape[1]]
        embedded: Tensor = self.drop(self.token(tokens) + positions)
        return embedded


class Block(nn.Module):
    """x + attention(norm(x)), then y + feed_forward(norm(y)); [B, T, width] -> the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.width)
        self.attention = Attention(spec)
        self.norm2 = nn.LayerNorm(spec.width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                inner=nn.Linear(spec.width, 4 * spec.width), gelu=nn.GELU(), out=nn.Linear(4 * spec.width, spec.width)
            )
        )
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the residual stream after the block, [B, T, width]."""
        attended = inputs + self.drop(self.attention(self.norm1(inputs)))
        output: Tensor = attended + self.drop(self.feed_forward(self.norm2(attended)))
        return output


class Attention(CausalLayer):
    """Causal attention in several heads; [B, T, width] -> the same. Keeps keys and values, [2, B, heads, tokens, d]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._heads = spec.heads
        self.query_key_value = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what each token finds by attention to itself and the tokens before it, [B, T, width]."""
        batch, length, width = inputs.shape
        heads = self.query_key_value(inputs).view(batch, length, 3, self._heads, -1)
        query, key, value = torch.unbind(heads.transpose(1, 3), dim=2)  # each [B, heads, T, width / heads]
        mask = None
        if self.keeps:
            kept = torch.stack((key, value))
            self.present = kept if self.past is None else torch.cat((self.past, kept), dim=3)
            key, value = self.present
            # a token sees itself and all before it: row t of the slice is at position `start` + t
            mask = torch.ones(length, self.start + length, dtype=torch.bool, device=inputs.device).tril(self.start)
        attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        mixed: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return mixed
