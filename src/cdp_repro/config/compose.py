"""From the command line to a `RunConfig`: Hydra composes the values, and all mistakes are reported together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cdp_repro.config.errors import ConfigError, refuse, refusing_unresolved
from cdp_repro.config.keys import leaves
from cdp_repro.config.loading import load_config
from cdp_repro.config.overrides import long_forms, parse_long_forms, readable, text_of
from cdp_repro.config.paths import refuse_long_names
from cdp_repro.config.schema import RunConfig
from cdp_repro.config.source import GROUPS, OURS, TREE, Source
from cdp_repro.config.unknown_names import unknown_choice, unknown_key


def compose_config(overrides: Sequence[str], check_device: bool = True, source: Source = OURS) -> RunConfig:
    """Return the configuration that the overrides (`key=value`) give; for `check_device` see `load_config`.

    Raises:
        ConfigError: lists all mistakes that were found: unknown keys and choices with the nearest name that exists,
            values of a wrong type or out of range, values that do not fit together, a broken YAML file.
    """
    composable, problems, tree = _examined(overrides, source)
    try:
        tree = tree or _composed(composable, source)
        problems += _missing_weights(tree)
        problems += [] if source == OURS else _names_of_other_choices(composable, source)
        config = load_config(tree, check_device)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    refuse(problems)
    return config


def _names_of_other_choices(overrides: Sequence[str], source: Source) -> list[str]:
    """Return a sentence for each group of which a user's file gives the name, which must come with its other values.

    With `optim: {name: adamw}`, AdamW would train with the values of the default, SGD.
    """
    tree = _composed(overrides, source, with_hydra=True)

    def values(group: str, choice: str) -> dict[str, Any]:
        return {**composed_of_ours((f"{group}={choice}",))[group], "name": None}

    found = []
    for group, choice in tree.hydra.runtime.choices.items():
        if group not in GROUPS or choice not in (ours := OURS.choices(group)):
            continue
        name = OmegaConf.select(tree, f"{group}.name", throw_on_resolution_failure=False)
        if name in ours and name != choice and values(group, name) != values(group, choice):
            found.append(
                f"{group}.name={name} would have the values of {group}={choice}: in a file, choose it by "
                f"`defaults: [override /{group}: {name}]`"
            )
    return found


def _missing_weights(tree: DictConfig) -> list[str]:
    """Return a sentence if the file `model.weights` does not exist.

    The run would find that out, too, but only after the import of torch, which takes seconds.
    """
    path = OmegaConf.select(tree, "model.weights", throw_on_resolution_failure=False)
    return [] if path is None or Path(str(path)).exists() else [
        f"model.weights={path} cannot be read: there is no such file"
    ]  # fmt: skip


def written_out(overrides: Sequence[str], source: Source = OURS, resolved: bool = False) -> list[str]:
    """Return the overrides in the form that Hydra reads, with our short forms written out; values are not checked.

    Raises:
        ConfigError: lists all overrides that cannot be read, and all unknown keys and choices. If the values will be
            `resolved`, also if one cannot be: Hydra would show a traceback.
    """
    composable, problems, _ = _examined(overrides, source)
    refuse(problems)
    if resolved:
        with refusing_unresolved():
            leaves(_composed(composable, source))
    return composable


def output_folder(kind: str, overrides: Sequence[str], source: Source = OURS) -> Path:
    """Return the folder in Hydra's setting `hydra.run.dir` (`kind` is `run`) or `hydra.sweep.dir` (`sweep`).

    Raises:
        ConfigError: the overrides cannot be read or composed, the setting cannot be resolved, or its path is too long.
    """
    single = [text_of(each) for each in parse_long_forms(overrides, source) if not each.is_sweep_override()]
    composable, *_ = _examined(single, source)  # the caller reports their problems
    tree = _composed(composable, source, with_hydra=True)
    try:
        folder = str(tree.hydra[kind].dir)
    except OmegaConfBaseException as error:
        raise ConfigError([f"hydra.{kind}.dir cannot be resolved: {str(error).splitlines()[0]}"]) from error
    refuse_long_names(folder)
    return Path(folder)


def _examined(overrides: Sequence[str], source: Source) -> tuple[list[str], list[str], DictConfig | None]:
    """Return the overrides that Hydra can compose, a sentence for each problem, and the tree if it is complete.

    The choices of groups decide which keys exist, so they are composed first. If the other overrides are plain values,
    this tree is complete with them; otherwise None stands in its place.
    """
    can_be_read, unreadable = readable(overrides)
    parsed = long_forms(can_be_read, source)
    problems = {id(override): problem for override in parsed if (problem := unknown_choice(override, source))}
    groups = [
        text_of(override)
        for override in parsed
        if source.is_group(override.key_or_group) and id(override) not in problems
    ]
    tree = composed_of_ours(tuple(groups)) if source == OURS else _composed(groups, source)
    found = leaves(tree, tolerant=True)
    known, missing = [key for key, _ in found], [key for key, value in found if value == MISSING]
    problems |= {id(item): problem for item in parsed if (problem := unknown_key(item, source, known, missing))}
    rest = [override for override in parsed if id(override) not in problems]
    values = [override for override in rest if not source.is_group(override.key_or_group)]
    sentences = [*unreadable, *problems.values(), *_placement_of_baseline(parsed)]
    # in a tree of the user's, a value may decide which file is chosen
    complete = _with_values(tree, values) if source == OURS or not values else None
    return [text_of(override) for override in rest], sentences, complete


def _with_values(tree: DictConfig, overrides: Sequence[Override]) -> DictConfig | None:
    """Return a copy of a composed tree with the values of `key=value`; None if only Hydra can apply the overrides.

    Hydra would compose the whole tree again before it sets them in the same way, which takes thirty times as long.
    """
    if not all(map(_is_plain, overrides)):
        return None
    changed = deepcopy(tree)
    try:
        for override in overrides:
            OmegaConf.update(changed, override.key_or_group, override.value())
    except OmegaConfBaseException:
        return None  # Hydra says what is wrong
    return changed


def _is_plain(override: Override) -> bool:
    """Whether an override sets one value of a key that exists."""
    is_change = override.type == OverrideType.CHANGE and override.package is None
    return is_change and not (override.is_hydra_override() or isinstance(override.value(), dict))


def _placement_of_baseline(parsed: Sequence[Override]) -> list[str]:
    """Return a sentence if a baseline and `placement=single_device` are both given.

    As the mere default, that placement is allowed. `limits` refuses all others.
    """
    chosen = {override.key_or_group: override.value() for override in parsed}
    if chosen.get("baseline") is None or chosen.get("placement") != "single_device":
        return []
    return [f"baseline={chosen['baseline']} places its stages itself: drop placement=single_device"]


@cache
def composed_of_ours(choices: tuple[str, ...]) -> DictConfig:
    """Return what Hydra composes for choices in our tree; cached, as the tree is fixed and cells often share choices.

    Copy the result before you change it.
    """
    return _composed(choices, OURS)


def _composed(overrides: Sequence[str], source: Source, with_hydra: bool = False) -> DictConfig:
    """Return what Hydra composes; `with_hydra` keeps Hydra's own settings.

    Raises:
        ConfigError: Hydra cannot compose the overrides; says why.
    """
    try:
        with _initialized(source) as searched:
            return compose(source.name, [*searched, *overrides], return_hydra_config=with_hydra)
    except YAMLError as error:
        raise ConfigError([f"a configuration file is not valid YAML: {error}"]) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([str(error)]) from error
    except RecursionError as error:
        chosen = ", ".join([source.name, *overrides])
        raise ConfigError([f"a configuration includes itself: look at the `defaults` of {chosen}"]) from error


@contextmanager
def _initialized(source: Source) -> Iterator[list[str]]:
    """Initialise Hydra with one folder for the body; yield the override that makes it search the other one, too.

    Hydra looks for the file of `--config-name` in its first folder only, so the folder that has this file comes first.
    The order has no other effect, because no file of the user's has the name of one of ours.
    """
    if source.folder is None:
        with initialize_config_module(TREE, job_name="cdp-train", version_base="1.3"):
            yield []
    elif (source.folder / f"{source.name}.yaml").exists():
        with initialize_config_dir(str(source.folder.absolute()), job_name="cdp-train", version_base="1.3"):
            yield [f"hydra.searchpath=[pkg://{TREE}]"]
    else:
        path = f"file://{source.folder.absolute()}".replace("\\", "\\\\").replace("'", "\\'")
        with initialize_config_module(TREE, job_name="cdp-train", version_base="1.3"):
            yield [f"hydra.searchpath=['{path}']"]
