"""Advice on sizes: finds sizes near those of a configuration that satisfy all limits of a run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cdp_repro.config.limits import wrong_with_sizes
from cdp_repro.config.schema import RunConfig

_REACH = 4
"""How far above and below a given number to search."""

_SIZES = ("workers", "stages", "ranks", "micro_batches", "batch_size")


def fits(config: RunConfig) -> bool:
    """Whether all sizes of a run fit together."""
    return not wrong_with_sizes(config)


def sizes_that_fit(config: RunConfig, most_stages: int | None = None) -> str | None:
    """Return overrides (`workers=3 batch_size=63`) with which all sizes of a run fit together.

    As few sizes as possible change, and by as little as possible. `most_stages` is the largest S that the model allows.
    The result is None if the sizes fit as they are, or if no sizes near them fit.
    """
    for near in sorted(_near(config), key=lambda near: _distance(near, config)):
        if (most_stages is None or near.stage_count <= most_stages) and fits(near):
            return " ".join(f"{name}={getattr(near, name)}" for name in _changed(near, config)) or None
    return None


def _near(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the configuration with workers, stages, ranks and micro-batches near its own, and a mini-batch they share.

    A size that is not set stays unset, and a size above 1 does not become 1.
    """

    def near(value: int | None, *others: int) -> list[int | None]:
        if value is None:
            return [None]
        return sorted({*range(max(min(2, value), value - _REACH), value + _REACH + 1), *others})

    ranges = (
        near(config.workers),
        near(config.stages),
        near(config.ranks, config.workers, config.stage_count),
        near(config.micro_batches),
    )
    for workers, stages, ranks, micro_batches in product(*ranges):
        assert workers is not None
        found = replace(config, workers=workers, stages=stages, ranks=ranks, micro_batches=micro_batches)
        try:
            parts = found.sample_parts
        except ValueError:  # M is that of a schedule, and these sizes have none
            continue
        yield replace(found, batch_size=max(1, round(config.batch_size / parts)) * parts)


def _changed(near: RunConfig, config: RunConfig) -> list[str]:
    return [name for name in _SIZES if getattr(near, name) != getattr(config, name)]


def _distance(near: RunConfig, config: RunConfig) -> tuple[int, float]:
    changed = _changed(near, config)
    return len(changed), sum(abs(getattr(near, name) / getattr(config, name) - 1) for name in changed)
