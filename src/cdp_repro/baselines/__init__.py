"""Baselines: torch's own libraries, which one could use instead of our engine, behind the engine's interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdp_repro.baselines.baseline import Baseline

BASELINES = {
    "ddp": ("torch_data_parallel", "DDPBaseline"),
    "fsdp2": ("torch_data_parallel", "FSDP2Baseline"),
    "torch_gpipe": ("torch_pipelining", "GPipeBaseline"),
    "torch_1f1b": ("torch_pipelining", "OneFOneBBaseline"),
}
"""Module and class by the name in `baseline=`. Only names, because importing the libraries takes seconds."""


def baseline_class(name: str) -> type[Baseline]:
    """Import the library behind `baseline=name` and return its class."""
    module, kind = BASELINES[name]
    found: type[Baseline] = getattr(import_module(f"{__name__}.{module}"), kind)
    return found
