"""From the overrides of a sweep (`seed=0,1,2`) to those of each of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString

from cdp_repro.config.errors import ConfigError, collecting, refuse
from cdp_repro.config.overrides import parse, text_of
from cdp_repro.config.paths import PATH_KEYS
from cdp_repro.config.source import OURS, Source
from cdp_repro.config.unknown_names import choosable, hydra_without_effect


def expand_sweep(overrides: Sequence[str], source: Source = OURS) -> list[list[str]]:
    """Return the overrides of every cell of a sweep.

    `seed=0,1,2` gives three cells, and several such overrides give all combinations. Of two overrides with the same
    key, the later counts. Hydra's own settings apply to the sweep, so cells do not have them.

    Raises:
        ConfigError: overrides that cannot be read, a sweep over endlessly many values or none, or settings of Hydra's
            own that have no effect.
    """
    parsed = parse(overrides)
    refuse(problem for override in parsed if (problem := hydra_without_effect(override)))
    of_cells = [override for override in parsed if not override.is_hydra_override()]
    alternatives: dict[str, list[str]] = {}
    problems: list[str] = []
    for override in of_cells:
        with collecting(problems):
            alternatives[override.get_key_element()] = _alternatives(override, source)
    refuse(problems)
    return [list(cell) for cell in product(*alternatives.values())]


def _alternatives(override: Override, source: Source) -> list[str]:
    """Return one override for each value that an override sweeps over."""
    if not override.is_sweep_override():
        return [text_of(override)]
    if not override.is_discrete_sweep():
        raise ConfigError([f"{text_of(override)} has no end: list its values, or use range(start,stop,step)"])
    key, value = override.key_or_group, override.value()
    if key in PATH_KEYS and isinstance(value, ChoiceSweep):  # as typed, but without quotes for Hydra
        return [f"{key}={each.text if isinstance(each, QuotedString) else each}" for each in value.list]
    names = value.filter(choosable(key, source)) if isinstance(value, Glob) else [*override.sweep_string_iterator()]
    if not names:
        choices = choosable(key, source)
        ways = f"choose {', '.join(choices)}" if choices else f"give one or more, such as {key}=1,2"
        raise ConfigError([f"{text_of(override)} stands for no value: {ways}"])
    return [f"{override.get_key_element()}={name}" for name in names]
