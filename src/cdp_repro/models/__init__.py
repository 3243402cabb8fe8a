"""Models as chains of named blocks, and their cut into stages at the boundaries of blocks."""

from cdp_repro.models.chain import cut
from cdp_repro.models.registry import BUILTIN_MODELS, build_model, original_tensors
from cdp_repro.models.spec import ModelError, ModelSpec

__all__ = ["BUILTIN_MODELS", "ModelError", "ModelSpec", "build_model", "cut", "original_tensors"]
