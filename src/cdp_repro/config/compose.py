"""From the command line to a `RunConfig`: Hydra composes, every mistake is reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.config.errors import nearest
from cdp_repro.config.keys import EXAMPLES, leaves, nested
from cdp_repro.config.paths import quoted_for_hydra
from cdp_repro.models import BUILTIN_MODELS
from cdp_repro.models.timm_models import is_timm_model, timm_model_names

GROUPS = ("mode", "dataset", "model", "placement", "optim", "delay", "experiment")


def compose_config(overrides: Sequence[str], check_device: bool = True) -> RunConfig:
    """Return the configuration that the overrides (`key=value`) stand for; `check_device` as in `load_config`.

    Raises:
        ConfigError: with all mistakes that were found: unknown keys and choices with the nearest name that exists,
            values of a wrong type or out of range, values that do not fit together.
    """
    parsed = _parsed([text for override in overrides for text in _written_out(override)])
    with initialize_config_module("cdp_repro.config.hydra_tree", version_base="1.3"):
        problems = {id(override): problem for override in parsed if (problem := _unknown_choice(override))}
        groups = [_text(override) for override in parsed if _is_group(override) and id(override) not in problems]
        found = leaves(compose("config", groups))
        known, missing = [key for key, _ in found], [key for key, value in found if value == MISSING]
        problems |= {id(item): problem for item in parsed if (problem := _unknown_key(item, known, missing))}
        try:
            tree = compose("config", [_text(override) for override in parsed if id(override) not in problems])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([*problems.values(), str(error)]) from error
    try:
        config = load_config(tree, check_device)
    except ConfigError as error:
        raise ConfigError([*problems.values(), *error.problems]) from error
    if problems:
        raise ConfigError(problems.values())
    return config


@cache
def compose_known(overrides: tuple[str, ...]) -> RunConfig:
    """Return what `compose_config` returns for overrides that are known to be right, in a fraction of the time.

    Hydra takes most of the time. So it composes each choice of groups once, and values are set on what it gave.
    """
    parsed = _parsed([text for override in overrides for text in _written_out(override)])
    groups = tuple(_text(override) for override in parsed if _is_group(override))
    values = [nested(override.key_or_group, override.value()) for override in parsed if not _is_group(override)]
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), _of_groups(groups), *values))
    assert isinstance(config, RunConfig)
    return config


@cache
def _of_groups(groups: tuple[str, ...]) -> dict[str, Any]:
    with initialize_config_module("cdp_repro.config.hydra_tree", version_base="1.3"):
        tree = compose("config", list(groups))
        found = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every cell of a sweep: `seed=0,1,2` stands for three, products over all sweeps."""
    parsed = _parsed([quoted_for_hydra(override) for override in overrides])
    return [list(cell) for cell in BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]]


def group_choices(groups: Sequence[str]) -> dict[str, list[str]]:
    """Return the choices of each group."""
    with initialize_config_module("cdp_repro.config.hydra_tree", version_base="1.3"):
        return {group: _choices(group) for group in groups}


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in overrides:
        try:
            text.encode()
            parsed.append(parser.parse_override(text))
        except UnicodeEncodeError:
            problems.append(f"{text!r} is not text in UTF-8: use another name")
        except HydraException as error:
            problems.append(f"{text!r} is not of the form key=value: {str(error).splitlines()[0]}")
    if problems:
        raise ConfigError(problems)
    return parsed


def _written_out(override: str) -> list[str]:
    """Write out the short forms: `mode=[[1,1],[1,0]]` gives a matrix, `model=NAME` may name one of timm's models."""
    group, _, choice = override.partition("=")
    if group == "mode" and choice.startswith("["):
        return ["mode=matrix", f"mode.staleness={choice}"]
    if group == "model" and choice not in (*BUILTIN_MODELS, "timm") and is_timm_model(choice):
        return ["model=timm", f"model.name={choice}"]
    return [quoted_for_hydra(override)]


def _text(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


def _is_group(override: Override) -> bool:
    return override.key_or_group in GROUPS


def _choices(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    names: list[str] = loader.get_group_options(group)
    if group == "experiment":
        names = [f"paper/{name}" for name in loader.get_group_options("experiment/paper")]
    return names


def _unknown_choice(override: Override) -> str | None:
    if override.is_sweep_override():
        return f"{_text(override)} has several values: add --multirun, which cdp-train has"
    group, choice = override.key_or_group, str(override.value())
    if not _is_group(override) or choice in (choices := _choices(group)):
        return None
    similar = [*choices, *timm_model_names()] if group == "model" else choices
    return f"unknown {group} {choice!r}: choose {', '.join(choices)}{nearest(choice, similar)}"


def _unknown_key(override: Override, known: Sequence[str], missing: Sequence[str]) -> str | None:
    """Return the problem with a key, if it has one.

    `missing` are keys that a choice leaves to the user, such as `model.name` with `model=timm`.
    """
    key = override.key_or_group
    group, _, rest = key.partition(".")
    if override.is_delete():
        return f"~{key}: a value cannot be removed, only set"
    if key in ("resume", "restart"):
        return "resume=RUN_DIRECTORY stands alone, with cdp-train (restart=true may stand beside it)"
    if group in GROUPS and rest == "name" and not (group == "model" and "model.name" in missing):
        return f"{key} is set by {group}=..., with what belongs to it"
    if _is_group(override) or any(leaf == key or leaf.startswith(f"{key}.") for leaf in known):
        return None
    if key in (leaf for leaf, _ in leaves(OmegaConf.structured(RunConfig))):
        given = f", or give {EXAMPLES[key]}" if key in EXAMPLES else ""
        return f"{key} has no effect with this {group}{_own_values(group, known)}{given}"
    return f"unknown key {key!r}{nearest(key, [*known, *GROUPS])}"


def _own_values(group: str, known: Sequence[str]) -> str:
    """Return the values that the choice of a group has, as the end of a sentence."""
    found = [leaf for leaf in known if leaf.startswith(f"{group}.") and not leaf.endswith(".name")]
    return f"; those that have are {', '.join(found)}" if found else ", which has no values of its own: leave it out"
