"""timm models regrouped into a chain of blocks, with a check that the chain is the same function.

A timm model that exposes `blocks` is cut into `embed`, one block per element of `blocks`, and `head`. The steps before
and after `blocks` differ between families; `_FAMILIES` lists them. Such a list can be wrong for a model whose own
forward does something else. So every model with weights is checked against its own forward before it is returned.

timm takes seconds to import, so it is only imported where it is needed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdp_repro.models.spec import ModelError, ModelSpec

WORKING_EXAMPLES = ("vit_tiny_patch16_224", "efficientnet_b0", "mobilenetv3_small_100", "mixer_s32_224")
"""timm models named in refusals, one per family."""

# What timm and torch raise for a shape, an option or an attribute that does not fit.
_MISFIT = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class _Family:
    """How a family's forward runs: the steps (children or methods of the model) before and after `blocks`."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    also_before: tuple[str, ...] = ()
    """Parameters and children that the steps before `blocks` use besides those named as steps."""


_FAMILIES = (
    _Family(
        "ViT",
        before=("patch_embed", "_pos_embed", "patch_drop", "norm_pre"),
        after=("norm", "forward_head"),
        also_before=("cls_token", "reg_token", "dist_token", "pos_embed", "pos_drop"),
    ),
    _Family("EfficientNet", before=("conv_stem", "bn1"), after=("conv_head", "bn2", "forward_head")),
    _Family("MobileNetV3", before=("conv_stem", "bn1"), after=("forward_head",)),
    _Family("Mixer", before=("stem",), after=("norm", "forward_head")),
)


def is_timm_model(name: str) -> bool:
    """Return whether timm has a model of this name."""
    import timm

    return bool(timm.is_model(name))


def timm_model_names() -> list[str]:
    """Return the names of all timm models."""
    import timm

    return list(timm.list_models())


def build_timm_model(spec: ModelSpec, name: str) -> nn.Sequential:
    """Build timm's model `name` without pretrained weights and regroup it into blocks.

    Raises:
        ModelError: the model has no `blocks`, is not a plain chain around them, or does not take the sizes in `spec`.
    """
    model = _create(spec, name)
    chain = _regroup(model, _blocks(model, name), _family(model, name))
    if not any(parameter.is_meta for parameter in model.parameters()):  # shapes alone cannot be compared
        _check_same_function(model, chain, spec, name)
    return chain


def timm_name(key: str) -> str:
    """Return the name that one of our tensors has in timm's model: `embed.part.cls_token` is `cls_token` there.

    `blocks_0_1.bn1.bias` is `blocks.0.1.bn1.bias`.
    """
    block, _, rest = key.partition(".")
    return rest.removeprefix("part.") if block in ("embed", "head") else f"{block.replace('_', '.')}.{rest}"


def _create(spec: ModelSpec, name: str) -> nn.Module:
    """Call timm with the options that this model takes."""
    import timm

    channels, *sides = spec.input_shape
    options: dict[str, Any] = {"img_size": tuple(sides)}
    if spec.dropout > 0:
        options |= {"drop_rate": spec.dropout, "proj_drop_rate": spec.dropout}
    while True:
        try:
            model: nn.Module = timm.create_model(
                name, pretrained=False, num_classes=spec.classes, in_chans=channels, **options
            )
        except _MISFIT as error:
            # Convolutional models take any size and have no `img_size`; few models have all dropout rates.
            refused = next((key for key in options if isinstance(error, TypeError) and f"'{key}'" in str(error)), None)
            if refused is None:
                raise ModelError(f"timm cannot build {name!r} for input_shape={spec.input_shape}: {error}") from error
            if refused == "drop_rate":
                raise ModelError(f"timm model {name!r} takes no dropout={spec.dropout}: use dropout=0") from error
            del options[refused]
        else:
            _require_whole_patches(model, spec, name)
            return model


def _require_whole_patches(model: nn.Module, spec: ModelSpec, name: str) -> None:
    """Refuse an image that patches do not tile: timm would silently drop the rest of it."""
    embedding = getattr(model, "patch_embed", getattr(model, "stem", None))
    patch = getattr(embedding, "patch_size", None)
    if not isinstance(patch, tuple):
        return
    sides = spec.input_shape[1:]
    if any(side % unit for side, unit in zip(sides, patch, strict=True)):
        fits = tuple(max(unit, side - side % unit) for side, unit in zip(sides, patch, strict=True))
        raise ModelError(
            f"timm model {name!r} cuts images into patches of {patch[0]}x{patch[1]} px, which do not tile "
            f"{sides[0]}x{sides[1]} px: use {fits[0]}x{fits[1]} px, or a model without patches such as resnet8"
        )


def _blocks(model: nn.Module, name: str) -> OrderedDict[str, nn.Module]:
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or len(blocks) == 0:
        raise ModelError(
            f"timm model {name!r} cannot be cut into stages: it has no `blocks` (an nn.Sequential or nn.ModuleList); "
            f"{_what_works()}"
        )
    return OrderedDict(_flat("blocks", blocks))


def _flat(prefix: str, blocks: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of `blocks`, and those of nested nn.Sequential (EfficientNet groups its blocks)."""
    for key, block in blocks.named_children():
        if type(block) is nn.Sequential:
            yield from _flat(f"{prefix}_{key}", block)
        else:
            yield f"{prefix}_{key}", block


def _family(model: nn.Module, name: str) -> _Family:
    """Return the first family for which the model has all steps."""
    missing = {}
    for family in _FAMILIES:
        missing[family.name] = [step for step in (*family.before, *family.after) if not hasattr(model, step)]
        if not missing[family.name]:
            return family
    lacks = "; ".join(f"{family} needs {', '.join(steps)}" for family, steps in missing.items())
    raise ModelError(
        f"timm model {name!r} cannot be cut into stages: it has `blocks`, but nothing is known of what runs around "
        f"them (missing attributes: {lacks}); {_what_works()}"
    )


def _regroup(model: nn.Module, blocks: OrderedDict[str, nn.Module], family: _Family) -> nn.Sequential:
    owned = {*model._parameters, *model._buffers, *model._modules} - {"blocks"}
    before = owned & {*family.before, *family.also_before}
    return nn.Sequential(
        OrderedDict(
            embed=_Section(model, before, family.before),
            **blocks,
            head=_Section(model, owned - before, family.after),
        )
    )


class _Section(nn.Module):
    """Some steps of a timm model, with exactly the parameters, buffers and children that belong to them."""

    def __init__(self, model: nn.Module, owned: set[str], steps: tuple[str, ...]) -> None:
        super().__init__()
        # Methods such as `_pos_embed` and `forward_head` read many attributes of their model. A shallow copy of the
        # model that keeps only what it owns runs them unchanged; reading anything else is an AttributeError.
        part = copy.copy(model)
        for registry in ("_parameters", "_buffers", "_modules"):
            setattr(part, registry, {key: value for key, value in getattr(model, registry).items() if key in owned})
        self.part = part
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = getattr(self.part, step)(x)
        return x


def _check_same_function(model: nn.Module, chain: nn.Sequential, spec: ModelSpec, name: str) -> None:
    """Refuse a chain whose output differs bitwise from the model's own forward, in eval mode on one random image.

    The parameters are shifted at random for the comparison: some models start with a zero head, or with blocks that are
    almost the identity, which would hide any difference. The model and the global generators are left unchanged.
    """
    generator = torch.Generator().manual_seed(0)
    shifted = {
        id(parameter): parameter.detach() + 0.02 * torch.randn(parameter.shape, generator=generator)
        for parameter in model.parameters()
    }
    if shifted.keys() != {id(parameter) for parameter in chain.parameters()}:
        raise ModelError(f"timm model {name!r} cannot be cut into stages: the cut loses parameters; {_what_works()}")
    image = torch.randn(1, *spec.input_shape, generator=generator)
    model.eval(), chain.eval()
    try:
        with torch.no_grad():
            own = _attempt(
                lambda: functional_call(model, _values(model, shifted), image),
                f"timm model {name!r} does not take input_shape={spec.input_shape}",
            )
            cut = _attempt(
                lambda: _run_blocks(chain, shifted, image),
                f"timm model {name!r} cannot be cut into stages: {_what_works()}",
            )
    finally:
        model.train(), chain.train()
    if not torch.equal(own, cut):  # nan is not equal either
        raise ModelError(
            f"timm model {name!r} cannot be cut into stages: its blocks run one after the other do not give what its "
            f"own forward gives; {_what_works()}"
        )


def _run_blocks(chain: nn.Sequential, parameters: Mapping[int, Tensor], x: Tensor) -> Tensor:
    """Run the blocks one by one; raise RuntimeError if one writes to its input, as it could not start a stage."""
    for key, block in chain.named_children():
        version = x._version
        y: Tensor = functional_call(block, _values(block, parameters), x)
        if x._version != version:
            raise RuntimeError(f"block {key} starts with an in-place operation on its input")
        x = y
    return x


def _values(module: nn.Module, parameters: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {key: parameters[id(parameter)] for key, parameter in module.named_parameters()}


def _attempt(run: Callable[[], Tensor], refusal: str) -> Tensor:
    try:
        return run()
    except _MISFIT as error:
        raise ModelError(f"{refusal} ({type(error).__name__}: {error})") from error


def _what_works() -> str:
    return f"models that work: {', '.join(WORKING_EXAMPLES)}, vit_b_16, resnet18"
