"""Seeds that depend on what is drawn, never on where or in what order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*keys: int | str) -> int:
    """Return a 63-bit seed that depends on every key, in order, and on nothing else.

    The same keys give the same seed on every platform, process and Python version (unlike `hash`).
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device | str, *keys: int | str) -> torch.Generator:
    """Return a fresh generator on `device`, seeded by `keys`."""
    return torch.Generator(device=device).manual_seed(derive_seed(*keys))


@contextmanager
def seeded(device: torch.device, *keys: int | str) -> Iterator[None]:
    """Run the body with torch's default generators seeded by `keys`, then restore their state."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        )
    before = [generator.get_state() for generator in generators]  # `fork_rng` does the same, ten times slower
    seed = derive_seed(*keys)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
