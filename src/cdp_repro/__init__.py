"""Cyclic data parallelism, simulated and executed from one schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdp_repro.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that the pure schedule never imports torch."""
    if name == "Engine":
        from cdp_repro.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'cdp_repro' has no attribute {name!r}")
