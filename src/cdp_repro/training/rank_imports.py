"""What the ranks of a run import: once, before they are forked, instead of once in each rank."""

from __future__ import annotations

from cdp_repro.config import RunConfig
from cdp_repro.schedule.by_name import is_entered

_WITH_LIBRARIES = ("digits", "cifar10", "imagenet")
"""Data sets whose modules import a library."""
_OF_MODELS = {"mlp": None, "gpt": None, "two_towers": "torchvision.models", "vit_b_16": "timm"}


def rank_imports(config: RunConfig) -> list[str]:
    """Return the modules that take every rank of a run a noticeable time to import."""
    dataset, model = config.dataset.name, config.model.name
    of_model = _OF_MODELS.get(model, "torchvision.models" if model.startswith("resnet") else "timm")
    # torch's optimizers and fake tensors import its compiler when they are first used; it imports what baselines need
    found = ["cdp_repro.training.run", "torch._dynamo"]
    if dataset in _WITH_LIBRARIES:
        found.append(f"cdp_repro.data.{dataset}")
    if of_model is not None and not is_entered("models", model):
        found.append(of_model)
    return found
