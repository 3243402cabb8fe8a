"""Models by name."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cdp_repro.models.gpt import build_gpt, is_transposed_in_transformers, transformers_name
from cdp_repro.models.mlp import build_mlp
from cdp_repro.models.resnet import build_small_resnet, build_torchvision_resnet, torchvision_name
from cdp_repro.models.spec import ModelError, ModelSpec
from cdp_repro.models.timm_models import build_timm_model, is_timm_model, timm_model_names, timm_name
from cdp_repro.models.two_towers import build_two_towers
from cdp_repro.schedule.by_name import ByName, is_entered, refusing

_BUILDERS: ByName[Callable[[ModelSpec], nn.Sequential]] = ByName(
    "models",
    {
        "mlp": build_mlp,
        "gpt": build_gpt,
        "resnet8": partial(build_small_resnet, name="resnet8", blocks_per_group=1),
        "resnet20": partial(build_small_resnet, name="resnet20", blocks_per_group=3),
        "resnet18": partial(build_torchvision_resnet, name="resnet18"),
        "resnet50": partial(build_torchvision_resnet, name="resnet50"),
        "vit_b_16": partial(build_timm_model, name="vit_base_patch16_224"),
        "two_towers": build_two_towers,
    },
    callable,
    "a function from a ModelSpec to an nn.Sequential of blocks",
)

BUILTIN_MODELS = tuple(_BUILDERS)
"""Names that `build_model` knows besides those of timm; a built-in name takes precedence over the same name in timm."""


def build_model(name: str, spec: ModelSpec, seed: int = 0) -> nn.Sequential:
    """Build a model as a chain of named blocks; it may be cut into stages between any two of them.

    `two_towers` has branches, each of which is a chain.

    The weights are drawn once, on the CPU, and only depend on the arguments. torch's global generators are left
    unchanged. Under `torch.device("meta")` the model is built on the meta device: shapes without weights.

    Args:
        name: one of `BUILTIN_MODELS`, a name that an installed package has entered, or any timm model that exposes
            `blocks` and is a plain chain around them.
        spec: the sizes. For images up to 64 px, the larger ResNets get the stem of the CDP paper's CIFAR-10 set-up
            (3x3, stride 1, no max-pool), else torchvision's. The small ones always have a 3x3 stem.
        seed: seed of the initial weights.

    Returns:
        Blocks in forward order, in training mode: [B, channels, height, width] -> logits [B, classes]; `gpt`: from
        tokens [B, T] to logits [B, T, classes].

    Raises:
        ModelError: unknown name (with the nearest ones), a timm model that cannot be cut, sizes that do not fit.
    """
    builder = _builder_of(name)
    if len(spec.input_shape) == 1 and name != "gpt":
        raise ModelError(f"{name} reads images, not sequences of {spec.input_shape[0]} tokens: use model=gpt")
    device = "meta" if torch.get_default_device().type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # Not torch.manual_seed, which also reseeds the GPUs.
        torch.default_generator.manual_seed(seed)
        return builder(spec)


def _builder_of(name: str) -> Callable[[ModelSpec], nn.Sequential]:
    if name in BUILTIN_MODELS:
        if is_entered("models", name):
            raise ModelError(f"an installed package has entered a model {name}, as one of ours is called: rename it")
        return _BUILDERS[name]
    if name in _BUILDERS:
        return partial(_build_entered, name=name)
    if is_timm_model(name):
        return partial(build_timm_model, name=name)
    raise ModelError(_unknown(name))


def _build_entered(spec: ModelSpec, name: str) -> nn.Sequential:
    """Build a model of an installed package, whose code can raise and return anything, and draw from any generator."""
    with refusing(f"model {name} cannot be built", ModelError), _all_generators_as_torchs():
        model: object = _BUILDERS[name](spec)
    if not isinstance(model, nn.Sequential):
        raise ModelError(f"model {name} is a {type(model).__name__}: give an nn.Sequential of its blocks, to cut it")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ModelError(f"model {name} does not know the shape of {lazy[0]} yet: run a batch of its shape through it")
    if len({*model}) < len(model):
        raise ModelError(f"model {name} has one block at several places: give each place a module of its own")
    return model.train()


@contextmanager
def _all_generators_as_torchs() -> Iterator[None]:
    """Seed Python's and numpy's generators as torch's is in the body; afterwards they are as they were."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    seed = torch.default_generator.initial_seed()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def original_tensors(model: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of tensors of the model `model`, with the names and the layout of its original.

    Copying into the views changes the tensors.
    """
    turned = {key for key in tensors if model == "gpt" and is_transposed_in_transformers(key)}
    found = {original_name(model, key): each.T if key in turned else each for key, each in tensors.items()}
    assert len(found) == len(tensors), f"{model}: two tensors have one name"
    return found


def original_name(model: str, key: str) -> str:
    """Return the name that a tensor of the model `model` has in torchvision's, timm's or transformers' own.

    ResNet-8 and -20 are not in torchvision; their tensors are named as if they were. Other models that are not timm's
    keep their names.
    """
    if model == "gpt":
        return transformers_name(key)
    if model in ("resnet8", "resnet20", "resnet18", "resnet50"):
        return torchvision_name(key)
    is_ours = (model in BUILTIN_MODELS and model != "vit_b_16") or is_entered("models", model)
    return key if is_ours else timm_name(key)


def _unknown(name: str) -> str:
    known = [*BUILTIN_MODELS, *timm_model_names()]
    nearest = difflib.get_close_matches(name.lower(), dict.fromkeys(known), n=5)
    hint = f"nearest names: {', '.join(nearest)}; " if nearest else ""
    return f"unknown model {name!r}; {hint}built-in models: {', '.join(BUILTIN_MODELS)}; or a timm model name"
