"""Sizes near those of a configuration that fit together: advice where several limits meet in one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cdp_repro.config.schema import RunConfig
from cdp_repro.schedule import Schedule

_REACH = 4
"""How far from a given number others are tried."""

_SIZES = ("workers", "stages", "micro_batches", "batch_size")


def fits(config: RunConfig) -> bool:
    """Whether there is a schedule of these sizes, and the mini-batch is cut into equal parts."""
    try:
        Schedule.of(config.spec())
        return config.batch_size % config.sample_parts == 0
    except ValueError:
        return False


def sizes_that_fit(config: RunConfig, most_stages: int | None = None) -> str | None:
    """Return overrides (`workers=3 batch_size=63`) with which all sizes of a run fit together.

    As few as possible differ from the given ones, and by as little as possible. `most_stages` is the largest S that the
    model allows. None: they fit as they are, or nothing near them does.
    """
    for near in sorted(_near(config), key=lambda near: _distance(near, config)):
        if (most_stages is None or near.stage_count <= most_stages) and fits(near):
            return " ".join(f"{name}={getattr(near, name)}" for name in _changed(near, config)) or None
    return None


def _near(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the configuration with other workers, stages and micro-batches, and a mini-batch that they cut equally.

    What is not set stays so, and several do not become one.
    """
    ranges = [
        [None] if value is None else range(max(min(2, value), value - _REACH), value + _REACH + 1)
        for value in (config.workers, config.stages, config.micro_batches)
    ]
    for workers, stages, micro_batches in product(*ranges):
        assert workers is not None
        near = replace(config, workers=workers, stages=stages, micro_batches=micro_batches)
        try:
            parts = near.sample_parts
        except ValueError:  # speeds of which there is no round
            continue
        yield replace(near, batch_size=max(1, round(config.batch_size / parts)) * parts)


def _changed(near: RunConfig, config: RunConfig) -> list[str]:
    return [name for name in _SIZES if getattr(near, name) != getattr(config, name)]


def _distance(near: RunConfig, config: RunConfig) -> tuple[int, float]:
    changed = _changed(near, config)
    return len(changed), sum(abs(getattr(near, name) / getattr(config, name) - 1) for name in changed)
