"""What the ranks of a run import: once, before they are forked, instead of once in each rank."""

from __future__ import annotations

from cdp_repro.config import RunConfig
from cdp_repro.schedule.by_name import is_entered

_OF_DATASETS = {
    "digits": "sklearn.datasets",
    "cifar10": "torchvision.datasets",
    "imagenet": "torchvision.transforms.v2",
}
_OF_MODELS = {"mlp": None, "gpt": None, "two_towers": "torchvision.models", "vit_b_16": "timm"}


def rank_imports(config: RunConfig) -> list[str]:
    """Return the modules that take every rank of a run a noticeable time to import."""
    dataset, model = config.dataset.name, config.model.name
    of_dataset = _OF_DATASETS.get(dataset)
    of_model = _OF_MODELS.get(model, "torchvision.models" if model.startswith("resnet") else "timm")
    compiler = "torch._dynamo"  # torch's optimizers and fake tensors import it when they are first used
    others = (of_dataset, None if is_entered("models", model) else of_model)
    return ["cdp_repro.training.run", compiler, *(each for each in others if each)]
