"""Composes overrides that are known to be right, such as those of our studies, in a fraction of Hydra's time.

Hydra and OmegaConf take most of the time. So Hydra composes our tree once, and choices and values, each given its type
once, are put into what it gave.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from cdp_repro.config.compose import composed_of_ours
from cdp_repro.config.keys import nested
from cdp_repro.config.overrides import parse_long_forms, text_of
from cdp_repro.config.schema import RunConfig
from cdp_repro.config.source import OURS, TREE


@cache
def compose_known(overrides: tuple[str, ...]) -> RunConfig:
    """Return what `compose_config` returns for overrides that are known to be right."""
    forms = [form for override in overrides for form in _known_forms(override)]
    config = deepcopy(_of_choices(tuple(text_of(form) for form in forms if OURS.is_group(form.key_or_group))))
    for form in forms:
        if not OURS.is_group(form.key_or_group):
            group, _, name = form.key_or_group.rpartition(".")
            setattr(attrgetter(group)(config) if group else config, name, _typed_value(text_of(form)))
    return config


@cache
def _known_forms(override: str) -> list[Override]:
    return parse_long_forms([override], OURS)


@cache
def _typed_value(override: str) -> Any:
    (form,) = _known_forms(override)
    return attrgetter(form.key_or_group)(_typed_tree(nested(form.key_or_group, form.value())))


@cache
def _of_choices(choices: tuple[str, ...]) -> RunConfig:
    """Return the configuration of some choices (`mode=dp`).

    A file stands at its group, as Hydra puts it: none of ours names others, but an experiment's, whose choices give way
    to those beside it and whose values count more.
    """
    chosen = dict(choice.split("=") for choice in choices)
    experiment = _file("experiment", chosen.pop("experiment")) if "experiment" in chosen else OmegaConf.create()
    beside = {
        key.removeprefix("override /"): name for each in experiment.pop("defaults", ()) for key, name in each.items()
    }
    tree = deepcopy(composed_of_ours(()))
    tree.update({group: _file(group, name) for group, name in {**beside, **chosen}.items()})
    OmegaConf.set_struct(tree, False)  # an experiment may name values that a choice beside it lacks
    return _typed_tree(OmegaConf.unsafe_merge(tree, experiment))  # the tree is a copy already


def _typed_tree(values: Any) -> RunConfig:
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    assert isinstance(config, RunConfig)
    return config


@cache
def _schema() -> DictConfig:
    schema = OmegaConf.structured(RunConfig)
    assert isinstance(schema, DictConfig)
    return schema


def _file(group: str, name: str) -> DictConfig:
    content = OmegaConf.create(files(TREE).joinpath(group, f"{name}.yaml").read_text())
    assert isinstance(content, DictConfig)
    return content
