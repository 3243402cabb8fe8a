"""Finds the keys and choices in overrides that do not exist or have no effect, and says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from cdp_repro.config.errors import nearest
from cdp_repro.config.keys import EXAMPLES, defaults, example_of
from cdp_repro.config.overrides import INSTALLED, text_of
from cdp_repro.config.source import GROUPS, Source
from cdp_repro.schedule.by_name import entered

HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
"""Hydra's own settings that have an effect here. Most others are about starting jobs, which `launch` does."""
_PLACEHOLDERS = ("installed", "matrix", "timm")
"""Choices for which people type what they stand for: `model=resnet50d`, `mode=[[1,1],[1,0]]`."""


def unknown_choice(override: Override, source: Source) -> str | None:
    """Return the problem with an override that has several values or chooses wrongly in a group, if there is one."""
    if override.is_sweep_override():
        return f"{text_of(override)} has several values: add --multirun, which cdp-train has"
    group, choice = override.key_or_group, override.value()
    if not source.is_group(group):
        return None
    known, choices = source.choices(group), choosable(group, source)
    if override.is_delete() or choice is None:
        if group in GROUPS and group != "experiment":
            return f"{text_of(override)}: every run has one: choose {', '.join(choices)}"
        return None if override.is_delete() else f"{text_of(override)} chooses nothing: use ~{group}"
    if choice in known:
        return None
    similar = [*choices, *_timm_model_names()] if group == "model" else choices
    return f"unknown {group} {str(choice)!r}: choose {', '.join(choices)}{nearest(str(choice), similar)}"


def choosable(group: str, source: Source) -> list[str]:
    """Return the choices of a group that need no other value, with what installed packages have entered."""
    found = [each for each in source.choices(group) if each not in _PLACEHOLDERS]
    return found + (entered(INSTALLED[group]) if group in INSTALLED else [])


def _timm_model_names() -> list[str]:
    from cdp_repro.models.timm_models import timm_model_names  # here: timm takes seconds

    return timm_model_names()


def unknown_key(override: Override, source: Source, known: Sequence[str], missing: Sequence[str]) -> str | None:
    """Return the problem with the key of an override, if there is one.

    `known` are the keys that the choices of groups give. `missing` are those among them that have no value yet, such as
    `model.name` with `model=timm`.
    """
    key = override.key_or_group
    group, _, rest = key.partition(".")
    if override.is_hydra_override():
        return hydra_without_effect(override)
    if group == "launcher":
        return f"{key} says how the runs of a sweep start: add --multirun, which cdp-train has"
    if key == "resume":
        return "resume=RUN_DIRECTORY is for cdp-train, without + before it, and without --multirun and --cfg"
    if key == "restart":
        return "restart=true needs resume=RUN_DIRECTORY beside it, with cdp-train"
    if group in GROUPS and rest == "name" and key not in missing:
        return f"{key} is set by {group}=..., with what belongs to it"
    if override.is_delete() and key in defaults():
        return f"~{key}: every run has a value of {key}, so that it cannot be deleted: give one, e.g. {example_of(key)}"
    if source.is_group(key) or any(leaf == key or leaf.startswith(f"{key}.") for leaf in known):
        return None
    if key not in defaults():
        return f"unknown key {key!r}{nearest(key, [*known, *GROUPS])}"
    if group in GROUPS:
        given = f", or give {EXAMPLES[key]}" if key in EXAMPLES else ""
        return f"{key} has no effect with this {group}{_own_values(group, known)}{given}"
    return None  # the user's top file lacks it: Hydra says that +key= adds it


def hydra_without_effect(override: Override) -> str | None:
    """Return a sentence if an override is a setting of Hydra's own that has no effect here."""
    key = override.key_or_group
    if not override.is_hydra_override() or key in HYDRA_KEYS:
        return None
    others = f"those that have are {', '.join(HYDRA_KEYS)}"
    return f"{key} has no effect: runs are started without Hydra's launchers (see launcher=); {others}"


def _own_values(group: str, known: Sequence[str]) -> str:
    """Return the keys that the choice of a group has, as the end of a sentence."""
    found = [leaf for leaf in known if leaf.startswith(f"{group}.") and not leaf.endswith(".name")]
    has = f"; those that have are {', '.join(found)}" if found else ", which has no values of its own"
    return f"{has}: leave it out"
