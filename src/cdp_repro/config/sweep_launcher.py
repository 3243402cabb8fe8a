"""`launcher=`: how the runs of a sweep are started. It belongs to the sweep, not to the configuration of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.config.errors import ConfigError, collecting, nearest, refuse
from cdp_repro.config.keys import nested


@dataclass
class LocalLauncher:
    """Starts the runs here, each in a process of its own."""

    jobs: int = 1
    """Runs at once; they share the cores."""


@dataclass
class SlurmLauncher:
    """Queues the runs as one array of jobs. Options that are not set are left to the cluster."""

    partition: str | None = None
    """`--partition` of sbatch."""
    account: str | None = None
    """`--account`."""
    time: str | None = None
    """`--time`; a run that reaches this limit is queued again and goes on."""
    nodes: int = 1
    """`--nodes` of each run, which share its ranks equally."""
    gpus_per_node: int = 0
    """`--gpus-per-node`."""
    cpus_per_task: int = 4
    """`--cpus-per-task`: on one node for the whole run, on several for each rank."""
    mem: str | None = None
    """`--mem` of each node."""
    at_once: int | None = None
    """The most runs of the array that run at once."""


Launcher = LocalLauncher | SlurmLauncher
LAUNCHERS: dict[str, type[LocalLauncher] | type[SlurmLauncher]] = {"local": LocalLauncher, "slurm": SlurmLauncher}

_OWN = re.compile(r"(\+{0,2}|~)launcher(\.|=|$)")
"""Matches how an override of the launcher begins, also with Hydra's signs `+`, `++` and `~`, which are refused."""


def launcher_of(overrides: Sequence[str]) -> Launcher:
    """Return the launcher that the overrides choose, by default `local`.

    Raises:
        ConfigError: lists all mistakes: an unknown launcher or key, a sign of Hydra's, a value of a wrong type or out
            of range.
    """
    own = [text for text in overrides if _OWN.match(text)]
    problems = [
        f"{text}: settings of the launcher take neither + nor ~: {_without_sign(text)}"
        for text in own
        if not text.startswith("launcher")
    ]
    plain = [text.lstrip("+") for text in own if not text.startswith("~")]
    names = [text.partition("=")[2] for text in plain if text.partition("=")[0] == "launcher"]
    name = names[-1] if names else "local"
    if name not in LAUNCHERS:
        raise ConfigError([*problems, _unknown(name)])
    values = [text for text in plain if text.startswith("launcher.")]
    return _filled(name, values, problems)


def of_runs(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that belong to the runs, not to the launcher."""
    return [text for text in overrides if not _OWN.match(text)]


def _without_sign(text: str) -> str:
    """Return what to write in place of an override that has one of Hydra's signs."""
    return "leave it out for its default" if text.startswith("~") else f"write {text.lstrip('+')}"


def _unknown(name: str) -> str:
    choices = ", ".join(LAUNCHERS)
    if "," in name:
        return f"launcher={name} names several, but a sweep starts in one way: choose one of {choices}"
    return f"unknown launcher {name!r}: choose {choices}{nearest(name, LAUNCHERS)}"


def _filled(name: str, overrides: Sequence[str], problems: list[str]) -> Launcher:
    """Return the launcher with these values.

    Raises:
        ConfigError: lists `problems` and all mistakes in the values.
    """
    kind = LAUNCHERS[name]
    known = [field.name for field in fields(kind)]
    found = OmegaConf.structured(kind)
    for text in overrides:
        key = text.removeprefix("launcher.").partition("=")[0]
        if key in known:
            with collecting(problems):
                found = _with_value(found, key, text)
        else:
            choices = ", ".join(f"launcher.{each}" for each in known)
            problems.append(f"launcher={name} has no launcher.{key}: it has {choices}{nearest(key, known)}")
    launcher = OmegaConf.to_object(found)
    assert isinstance(launcher, (LocalLauncher, SlurmLauncher))
    refuse([*problems, *_out_of_range(launcher)])
    return launcher


def _with_value(launcher: Any, key: str, text: str) -> Any:
    """Return the launcher with one more value set; raise ConfigError if the value has a wrong type."""
    several = False
    try:
        override = OverridesParser.create().parse_override(text)
        value, several = override.value(), override.is_sweep_override()
        if several or isinstance(value, float):  # texts for sbatch stay as typed: `1e3`, or two partitions `a,b`
            value = override.get_value_string()
        return OmegaConf.merge(launcher, nested(key, value))
    except (HydraException, OmegaConfBaseException) as error:
        why = str(error).splitlines()[0]
        if several:
            why = f"a sweep starts in one way: give one value, such as launcher.{key}={launcher[key] or 1}"
        raise ConfigError([f"{text}: {why}"]) from error


def _out_of_range(launcher: Launcher) -> list[str]:
    minima = {"jobs": 1, "nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1, "at_once": 1}
    found = []
    for key, minimum in minima.items():
        value = getattr(launcher, key, None)
        if value is not None and value < minimum:
            found.append(f"launcher.{key}={value}: must be {minimum} or more")
    empty = [field.name for field in fields(launcher) if getattr(launcher, field.name) == ""]
    return [*found, *(f"launcher.{key}= is empty: give what sbatch takes, or leave it out" for key in empty)]
