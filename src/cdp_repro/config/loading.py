"""From the tree that Hydra composes to a checked `RunConfig`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.config.errors import nearest, refuse, refusing_unresolved
from cdp_repro.config.fitting import sizes_that_fit
from cdp_repro.config.keys import SCHEDULE_KEYS, defaults, example_of, leaves, nested
from cdp_repro.config.limits import inconsistent_elsewhere, inconsistent_in_schedule
from cdp_repro.config.ranges import out_of_range
from cdp_repro.config.schema import ClusterConfig, OptimConfig, RunConfig
from cdp_repro.config.source import GROUPS


def load_config(composed: DictConfig, check_device: bool = True, proposes_sizes: bool = True) -> RunConfig:
    """Return the typed configuration. Without `check_device`, `device=cuda` is accepted on a machine without CUDA.

    With `proposes_sizes`, mistakes in sizes come with sizes that fit; leave it out where other sizes may not be given.

    Raises:
        ConfigError: lists all values that are missing, of a wrong type or out of range, or do not fit together.
    """
    config, wrong = _typed(composed)
    problems = [*wrong.values()]
    excessive = dict(out_of_range(config))
    problems += excessive.values()
    if not {*wrong, *excessive} & SCHEDULE_KEYS:
        found = [*inconsistent_in_schedule(config)]
        problems += _with_sizes_that_fit(config, found) if proposes_sizes else found
    problems += inconsistent_elsewhere(config)
    if check_device and config.device == "cuda":
        import torch  # here: it takes seconds, and only this question needs it

        if not torch.cuda.is_available():
            problems.append("device=cuda: torch finds no CUDA device on this machine; use device=cpu (or device=auto)")
    refuse(problems)
    return config


def _with_sizes_that_fit(config: RunConfig, problems: list[str]) -> list[str]:
    """Return the problems; if sizes do not fit together, the last one also names sizes that do, unless any does."""
    works = sizes_that_fit(config) if problems else None
    if works is None or any(works in problem for problem in problems):
        return problems
    return [*problems[:-1], f"{problems[-1]}; with the other values, {works} would fit"]


def without_effect(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that has no effect in this run, or not the effect that its name promises."""
    found = [*_of_learning_rate(config)]
    if config.dataset.classes == 1:
        found.append("dataset.classes=1 leaves nothing to learn: every prediction is right")
    if config.evaluate_every_epochs > config.epochs:
        found.append(
            f"evaluate_every_epochs={config.evaluate_every_epochs} is not reached in epochs={config.epochs}: only the "
            "last is evaluated"
        )
    if config.baseline is not None and config.traced_steps:
        found.append(
            f"traced_steps={config.traced_steps} has no effect with baseline={config.baseline}, whose actions are not "
            "recorded"
        )
    return [*found, *without_effect_on_steps(config)]


def without_effect_on_steps(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that changes nothing in what the training steps compute, or how."""
    found = []
    if config.price or config.cluster != ClusterConfig():
        found.append("price=true and cluster.* have no effect on a training: give them to cdp-plan")
    if config.collectives and config.processes == 1:
        found.append("collectives=true has no effect on one rank")
    spec = config.spec()
    unchosen = replace(spec, pipeline_schedule=RunConfig.pipeline_schedule)
    if spec != unchosen and spec.chosen_mode.timeline == unchosen.chosen_mode.timeline:
        found.append(f"pipeline_schedule={config.pipeline_schedule} has no effect but with mode=dp placement=pipeline")
    if config.channels_last and config.model.name in ("mlp", "gpt"):
        found.append(f"channels_last=true has no effect on model={config.model.name}")
    return [*found, *_of_delay(config)]


def _of_learning_rate(config: RunConfig) -> Iterator[str]:
    optim = config.optim
    if optim.lr == 0:
        yield "optim.lr=0 leaves all parameters as they are"
    if optim.warmup_epochs >= config.epochs:
        yield (
            f"optim.warmup_epochs={optim.warmup_epochs:g} covers all epochs={config.epochs}: the learning rate only "
            "grows"
        )
    elif optim.schedule == "step" and optim.step_epochs >= config.epochs:
        yield f"optim.step_epochs={optim.step_epochs} is not reached in epochs={config.epochs}"
    for name in ("step_epochs", "gamma") if optim.schedule != "step" else ():
        if (value := getattr(optim, name)) != getattr(OptimConfig, name):
            schedule = f"optim.schedule={optim.schedule}"
            yield f"optim.{name}={value} has no effect with {schedule}: it is of optim.schedule=step"


def _of_delay(config: RunConfig) -> Iterator[str]:
    delay = config.delay
    by_share = delay.name != "error_feedback" or delay.strength is None
    if delay.name in ("error_feedback", "compensation") and delay.strength == 0:
        yield f"delay={delay.name} has no effect with delay.strength=0, which corrects nothing"
    elif delay.name != "none" and by_share and config.schedule().rule.longest == 0:
        yield f"delay={delay.name} has no effect with mode={config.mode.name}, which reads nothing late"


def _typed(composed: DictConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration, and a sentence for each key that is unknown or whose value is missing or mistyped.

    Such values are replaced by their defaults. OmegaConf stops at the first value of a wrong type. So all values are
    merged at once first; only if that fails they are merged one by one, which takes fifty times as long.

    Raises:
        ConfigError: an interpolation in the tree cannot be resolved.
    """
    schema = settings_schema()
    with refusing_unresolved():
        given = leaves(composed)
    problems = {
        key: f"{key} has no value yet: give one, e.g. {example_of(key)}" for key, value in given if value == MISSING
    }
    present = [(key, value) for key, value in given if value != MISSING]
    try:
        merged = OmegaConf.merge(schema, *(nested(*each) for each in present))
    except OmegaConfBaseException:
        wrong = dict(_mistyped(schema, present))
        problems |= wrong
        merged = OmegaConf.merge(schema, *(nested(*each) for each in present if each[0] not in wrong))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    return config, problems


@cache
def settings_schema() -> DictConfig:
    """Return the types of all settings; `merge` copies it."""
    schema: DictConfig = OmegaConf.structured(RunConfig)
    return schema


def _mistyped(schema: DictConfig, given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each key that is unknown, or whose value has a wrong type, with a sentence that says so."""
    known = defaults()
    for key, value in given:
        if key in GROUPS:
            yield key, f"{key} is a group: a file chooses in it by `defaults: [override /{key}: {value}]`"
            continue
        if key not in known:
            yield key, f"unknown key {key!r}{nearest(key, [*known])}"
            continue
        try:
            OmegaConf.merge(schema, nested(key, value))
        except OmegaConfBaseException as error:
            why = re.sub(r" of type '\w+'", "", str(error).splitlines()[0])  # OmegaConf's internal names of types
            yield key, f"{key}={value}: {why}; use e.g. {example_of(key)}"
