"""Composes overrides that are known to be valid, such as those of our studies, in a fraction of Hydra's time.

Most of the time goes into Hydra and OmegaConf. So Hydra composes our tree only once. Each combination of choices is
merged into a copy of this tree once, each value is converted to its type once, and the results are kept.
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
from cdp_repro.config.loading import settings_schema
from cdp_repro.config.overrides import parse_long_forms, text_of
from cdp_repro.config.schema import RunConfig
from cdp_repro.config.source import OURS, TREE


@cache
def compose_known(overrides: tuple[str, ...]) -> RunConfig:
    """Return what `compose_config` returns for overrides that are known to be valid.

    Do not change the result: all calls with the same overrides share it.
    """
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
    """Return the configuration for choices of groups (`mode=dp`), composed as Hydra does it.

    The content of a choice's file becomes the value of its group. Only files of experiments choose other files; choices
    given beside an experiment replace its own. The values of an experiment override those of the chosen files.
    """
    chosen = dict(choice.split("=") for choice in choices)
    experiment = _file("experiment", chosen.pop("experiment")) if "experiment" in chosen else OmegaConf.create()
    beside = {
        key.removeprefix("override /"): name for each in experiment.pop("defaults", ()) for key, name in each.items()
    }
    tree = deepcopy(composed_of_ours(()))
    tree.update({group: _file(group, name) for group, name in {**beside, **chosen}.items()})
    OmegaConf.set_struct(tree, False)  # an experiment may set values that the chosen files lack
    return _typed_tree(OmegaConf.unsafe_merge(tree, experiment))  # it changes the tree, which is a copy


def _typed_tree(values: Any) -> RunConfig:
    config = OmegaConf.to_object(OmegaConf.merge(settings_schema(), values))
    assert isinstance(config, RunConfig)
    return config


def _file(group: str, name: str) -> DictConfig:
    content = OmegaConf.create(files(TREE).joinpath(group, f"{name}.yaml").read_text())
    assert isinstance(content, DictConfig)
    return content
