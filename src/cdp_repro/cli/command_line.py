"""A command line: options of the command, options of every Hydra application, and overrides, in any order."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cdp_repro.cli.console import exit_code_of, help_text
from cdp_repro.cli.streams import write_error, write_out
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import written_out
from cdp_repro.config.errors import nearest
from cdp_repro.config.keys import defaults
from cdp_repro.config.paths import typed_path
from cdp_repro.config.source import GROUPS, Source

HYDRA_USAGE = """
Hydra's own options:

  --cfg job|hydra|all        show the configuration, run nothing (with --resolve
                             or --package NAME)
  --info [defaults|...]      show how it is composed
  --config-dir FOLDER --config-name NAME
                             read YAML files of yours, too, in a folder laid out
                             as configs/ is
  --shell-completion bash    print code that completes keys and choices:
                             eval "$({name} --shell-completion bash)"
  --hydra-help               explain all of these
"""

_FLAG = {"action": "store_true"}
_TOLD_BY_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_OF_HYDRA: dict[tuple[str, ...], dict[str, Any]] = {
    ("--help", "-h"): _FLAG,
    ("--hydra-help",): _FLAG,
    ("--cfg", "-c"): {"choices": ("job", "hydra", "all")},
    ("--resolve",): _FLAG,
    ("--package", "-p"): {},
    ("--info", "-i"): {"nargs": "?", "const": "all", "choices": _TOLD_BY_INFO},
    ("--shell-completion", "-sc"): _FLAG,
    ("--config-dir", "-cd"): {},
    ("--config-name", "-cn"): {"default": "config"},
    ("--run", "-r"): _FLAG,  # no effect: a command runs in any case
}
"""By their names: how the options of Hydra that have a meaning here are parsed."""
_SHELLS = ("bash", "zsh", "fish")
_COMPLETION_ACTIONS = ("install", "uninstall", "query")
"""What Hydra can do with shell completion."""

_QUESTIONS = ("cfg", "info", "shell-completion", "hydra-help")
"""Options that Hydra answers itself, in place of a run."""


@dataclass(frozen=True)
class CommandLine:
    """The parsed command line of a command."""

    overrides: Sequence[str]
    """As typed, `key=value`."""
    options: Mapping[str, str]
    """The command's own options that were given: their values by name, without dashes."""
    flags: frozenset[str]
    """The command's own flags that were given: their long names, with dashes."""
    source: Source


@dataclass(frozen=True)
class Command:
    """A command whose configuration Hydra composes."""

    name: str
    usage: str
    run: Callable[[CommandLine], int]
    """Returns the exit code; may raise errors that `exit_code_of` reports."""
    options: tuple[str, ...] = ()
    """Names of its own options, without dashes; each takes a value."""
    flags: tuple[tuple[str, ...], ...] = ()
    """Names of its own flags, with dashes, the long one first."""
    more_help: Callable[[], str] = str
    """Returns the part of `--help` on settings that are not in the configuration of a run."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command, show its help or let Hydra answer; return the exit code, 2 for the user's mistakes."""
        with exit_code_of() as result:
            known = self._arguments()
            given, unknown = _parser(known).parse_known_intermixed_args(arguments)
            if unknown:
                names = [name for each in known for name in each]
                hint = nearest(unknown[0], names)
                word = unknown[0].lstrip("-")
                if (key := word.partition("=")[0]) in (*defaults(), *GROUPS, "resume", "restart", "launcher"):
                    hint = f": a setting has no dashes, write {word if '=' in word else f'{key}=...'}"
                if unknown[0] in ("-m", "--multirun"):
                    hint = f": {self.name} takes one run at a time; cdp-train sweeps over many"
                how, _, _ = self.usage.partition("\n\n")
                write_error(f"unknown option {unknown[0]}{hint}\n\n{how}\n\n{self.name} --help explains all\n")
                result.code = 2
            elif given.help:
                write_out(help_text(self.usage + HYDRA_USAGE.format(name=self.name) + self.more_help()))
                result.code = 0
            else:
                result.code = self._answer(given)
        return result.code

    def _arguments(self) -> dict[tuple[str, ...], dict[str, Any]]:
        return {**_OF_HYDRA, **dict.fromkeys(self.flags, _FLAG), **{(f"--{name}",): {} for name in self.options}}

    def _answer(self, given: Namespace) -> int:
        source = _source(given)
        flags = frozenset(name for name, *_ in self.flags if getattr(given, name[2:].replace("-", "_")))
        if words := _for_hydra(given, flags, source):
            from cdp_repro.cli.hydra_main import ask_hydra  # here: a run does not need it

            return ask_hydra(self.name, [*words, *source.arguments()])
        options = {name: value for name in self.options if (value := getattr(given, name)) is not None}
        return self.run(CommandLine(given.overrides, options, flags, source))


class _Parser(ArgumentParser):
    """Raises ConfigError for a mistake, as the rest of the package does, where `argparse` would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([re.sub("ignored explicit argument (.*)", r"takes no value, not \1", message)])


def _parser(options: Mapping[tuple[str, ...], Mapping[str, Any]]) -> ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names, how in options.items():
        parser.add_argument(*names, **how)
    return parser


def _source(given: Namespace) -> Source:
    name = given.config_name.removesuffix(".yaml")  # as Hydra does
    return Source(name=name) if given.config_dir is None else Source(Path(typed_path(given.config_dir)), name)


def _for_hydra(given: Namespace, flags: Collection[str], source: Source) -> list[str]:
    """Return the arguments with which Hydra answers in place of the command; [] if the command is to run.

    Raises:
        ConfigError: options that exclude each other, or overrides with unknown keys or choices.
    """
    asked = [f"--{name}" for name in _QUESTIONS if getattr(given, name.replace("-", "_"))]
    if asked and len([*asked, *flags]) > 1:
        raise ConfigError([f"{', '.join([*asked, *sorted(flags)])} ask for different things: give one of them"])
    if not given.cfg and (given.resolve or given.package):
        raise ConfigError(["--resolve and --package say how --cfg shows the configuration: add --cfg job"])
    if given.hydra_help:
        return ["--hydra-help"]
    if given.shell_completion:
        return ["--shell-completion", _completion(given.overrides)]
    if given.info:
        return [*_checked(given.overrides, source), "--info", given.info]
    if given.cfg == "hydra" and given.resolve:
        raise ConfigError(["--cfg hydra --resolve: its settings refer to those of the run: use --cfg all --resolve"])
    if given.cfg:
        how = [*(["--resolve"] if given.resolve else []), *(["--package", given.package] if given.package else [])]
        return [*_checked(given.overrides, source, given.resolve), "--cfg", given.cfg, *how]
    return []


def _completion(words: Sequence[str]) -> str:
    """Return the request to Hydra's shell completion: `bash` asks to install it, `query=bash` is what a shell calls."""
    action, _, shell = (
        (words[0] if "=" in words[0] else f"install={words[0]}").partition("=") if words else ("", "", "")
    )
    if len(words) != 1 or action not in _COMPLETION_ACTIONS or shell not in _SHELLS:
        ways = f'eval "$(cdp-train --shell-completion {_SHELLS[0]})"'
        raise ConfigError([f"--shell-completion takes one shell, {', '.join(_SHELLS)}: {ways}"])
    return f"{action}={shell}"


def _checked(overrides: Sequence[str], source: Source, resolved: bool = False) -> list[str]:
    """Return checked overrides for Hydra. Its own settings are not checked, because its answer shows their effect."""
    own = [text for text in overrides if text.lstrip("+~").startswith(("hydra.", "hydra/"))]
    return [*written_out([text for text in overrides if text not in own], source, resolved), *own]
