"""`launcher=`: how the runs of a sweep are started. It is about the sweep, so a run's own configuration lacks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.config.errors import ConfigError, nearest
from cdp_repro.config.keys import nested


@dataclass
class LocalLauncher:
    """Starts the runs here, each in a process of its own."""

    jobs: int = 1
    """Runs at once; they share the cores."""


@dataclass
class SlurmLauncher:
    """Queues the runs as one array of jobs; what is not set is the cluster's default."""

    partition: str | None = None
    """`--partition` of sbatch."""
    account: str | None = None
    """`--account`."""
    time: str | None = None
    """`--time`; a run that comes to its end queues again and goes on."""
    nodes: int = 1
    """`--nodes` of each run; its ranks are shared equally among them."""
    gpus_per_node: int = 0
    """`--gpus-per-node`."""
    cpus_per_task: int = 4
    """`--cpus-per-task`, of each rank on several nodes, else of all."""
    mem: str | None = None
    """`--mem` of each node."""
    at_once: int | None = None
    """The most runs of the array that run at once."""


Launcher = LocalLauncher | SlurmLauncher
LAUNCHERS: dict[str, type[LocalLauncher] | type[SlurmLauncher]] = {"local": LocalLauncher, "slurm": SlurmLauncher}


def split_launcher(overrides: Sequence[str]) -> tuple[Launcher, list[str]]:
    """Return the launcher that the overrides ask for, and the overrides that are of the runs.

    Raises:
        ConfigError: with all mistakes: an unknown launcher or key, a value of a wrong type or out of range.
    """
    own = [text for text in overrides if text.partition("=")[0] == "launcher" or text.startswith("launcher.")]
    names = [text.partition("=")[2] for text in own if text.startswith("launcher=")]
    name = names[-1] if names else "local"
    if name not in LAUNCHERS:
        raise ConfigError([f"unknown launcher {name!r}: choose {', '.join(LAUNCHERS)}{nearest(name, LAUNCHERS)}"])
    values = [text for text in own if not text.startswith("launcher=")]
    return _filled(name, values), [text for text in overrides if text not in own]


def _filled(name: str, overrides: Sequence[str]) -> Launcher:
    kind = LAUNCHERS[name]
    known = [field.name for field in fields(kind)]
    found, problems = OmegaConf.structured(kind), []
    for text in overrides:
        key = text.removeprefix("launcher.").partition("=")[0]
        if key not in known:
            choices = ", ".join(f"launcher.{each}" for each in known)
            problems.append(f"launcher={name} has no launcher.{key}: it has {choices}{nearest(key, known)}")
            continue
        try:
            override = OverridesParser.create().parse_override(text)
            value = override.value()
            if isinstance(value, float):  # no launcher has one; as text of SLURM's it stands as it was typed
                value = override.get_value_string()
            found = OmegaConf.merge(found, nested(key, value))
        except (HydraException, OmegaConfBaseException) as error:
            problems.append(f"{text}: {str(error).splitlines()[0]}")
    launcher = OmegaConf.to_object(found)
    assert isinstance(launcher, (LocalLauncher, SlurmLauncher))
    problems += _out_of_range(launcher)
    if problems:
        raise ConfigError(problems)
    return launcher


def _out_of_range(launcher: Launcher) -> list[str]:
    minima = {"jobs": 1, "nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1, "at_once": 1}
    found = []
    for key, minimum in minima.items():
        value = getattr(launcher, key, None)
        if value is not None and value < minimum:
            found.append(f"launcher.{key}={value}: must be {minimum} or more")
    empty = [field.name for field in fields(launcher) if getattr(launcher, field.name) == ""]
    return [*found, *(f"launcher.{key}= is empty: give what sbatch takes, or leave it out" for key in empty)]
