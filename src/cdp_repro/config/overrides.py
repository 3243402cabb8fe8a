"""Reads overrides (`key=value`) as Hydra does, and writes out our short forms."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from cdp_repro.config.errors import ConfigError, refuse
from cdp_repro.config.paths import quoted_for_hydra
from cdp_repro.config.source import GROUPS, Source
from cdp_repro.schedule.by_name import is_entered

INSTALLED = {"mode": "modes", "placement": "placements", "model": "models", "dataset": "datasets"}
"""By group: the name of the entry points under which installed packages enter more choices."""


def parse_long_forms(overrides: Sequence[str], source: Source) -> list[Override]:
    """Return the overrides as Hydra reads them, with our short forms written out; raise ConfigError as `parse` does."""
    return long_forms(parse(overrides), source)


def long_forms(parsed: Sequence[Override], source: Source) -> list[Override]:
    """Return the overrides with our short forms written out."""
    return [form for override in parsed for form in _forms(override, source)]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra reads them; raise ConfigError that lists all that cannot be read."""
    parsed, problems = readable(overrides)
    refuse(problems)
    return parsed


def readable(overrides: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Return the overrides that can be read, as Hydra reads them, and a sentence for each problem of the others."""
    parser = OverridesParser.create()
    parsed, problems = [], []
    for text in overrides:
        try:
            text.encode()
            parsed.append(parser.parse_override(quoted_for_hydra(text)))
        except UnicodeEncodeError:
            problems.append(
                f"{text!r} is not text in UTF-8: use another name, or a locale that knows it (LANG=C.UTF-8)"
            )
        except ConfigError as error:
            problems += error.problems
        except HydraException:
            key, equals, _ = text.partition("=")
            closed = f": close its brackets and quotes, or write {key}='...' if it is text" if equals else ""
            problems.append(f"{text!r} is not of the form key=value{closed or ', such as workers=4'}")
    return parsed, problems


def _forms(override: Override, source: Source) -> list[Override]:
    """Return an override with our short forms written out.

    `mode=[[1,1],[1,0]]` gives a staleness matrix, and `model=NAME` may name one of timm's models. In the groups of
    `INSTALLED`, the name may be one that an installed package has entered.
    """
    key, value = override.key_or_group, override.value()
    if override.is_add() and key in GROUPS:
        (chosen,) = parse([text_of(override).removeprefix("+")])  # Hydra would refuse `+` for groups in our defaults
        return _forms(chosen, source)
    if key == "mode" and isinstance(value, list):
        return parse(["mode=matrix", f"mode.staleness={override.get_value_string()}"])
    if key not in INSTALLED or not isinstance(value, str) or value in source.choices(key):
        return [override]
    if is_entered(INSTALLED[key], value):
        return parse([f"{key}=installed", f"{key}.name={value}"])
    if key == "model" and _is_timm_model(value):
        return parse(["model=timm", f"model.name={value}"])
    return [override]


def _is_timm_model(name: str) -> bool:
    from cdp_repro.models.timm_models import is_timm_model  # here: timm takes seconds, and few runs need it

    return is_timm_model(name)


def text_of(override: Override) -> str:
    """Return the text of an override that Hydra parsed; its path, if it has one, is in quotes."""
    assert override.input_line is not None
    return override.input_line
