"""What the benches train: a network on random images."""

from __future__ import annotations

from cdp_repro.config import RunConfig
from cdp_repro.config.schema import DatasetConfig, ModelConfig


def on_random_images(model: str, image_size: int, workers: int, batch_size: int, partition: str) -> RunConfig:
    classes = 10 if image_size == 32 else 1000
    return RunConfig(
        dataset=DatasetConfig("synthetic", channels=3, image_size=image_size, classes=classes),
        model=ModelConfig(model),
        workers=workers,
        batch_size=batch_size,
        partition=partition,
    )
