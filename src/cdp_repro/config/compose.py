"""From the command line to a `RunConfig`: Hydra composes, every mistake is reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cdp_repro.config import ConfigError, RunConfig, load_config
from cdp_repro.config.errors import nearest, refuse
from cdp_repro.config.keys import EXAMPLES, defaults, example_of, leaves, nested
from cdp_repro.config.paths import PATH_KEYS, quoted_for_hydra, refuse_long_names
from cdp_repro.schedule.by_name import is_entered

TREE = "cdp_repro.config.hydra_tree"
"""The package with our YAML files."""

GROUPS = ("mode", "dataset", "model", "placement", "optim", "delay", "experiment")

HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
"""Hydra's own settings that have an effect here. Its others are about starting jobs, which `launch` does."""


@dataclass(frozen=True)
class Source:
    """Where configurations are read: in our tree, and in a folder of the user's.

    Raises:
        ConfigError: there is no such folder or file, or one of the files has the name of one of ours.
    """

    folder: Path | None = None
    """`--config-dir`: a folder laid out like our tree."""
    name: str = "config"
    """`--config-name`: the file that lists what is composed."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            self._check_folder(self.folder)
        if self.name == "config":
            return
        names = [name for root in self._roots() for name in _yaml_names(root)]
        wanted = self.name.removesuffix(".yaml")
        if wanted not in names:
            where = "our tree" if self.folder is None else f"our tree and {self.folder}"
            similar = nearest(wanted, [name for name in names if "/" not in name])
            raise ConfigError(
                [
                    f"--config-name={self.name}: there is no {wanted}.yaml in {where}{similar}; give the folder of "
                    "yours by --config-dir=, or leave it out for config.yaml"
                ]
            )

    def _check_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                [f"--config-dir={folder}: there is no such folder; give one that is laid out as configs/ is"]
            )
        ours, theirs = ({*_yaml_names(root)} for root in (files(TREE), folder))
        if ours & theirs:
            shared = ", ".join(f"{name}.yaml" for name in sorted(ours & theirs))
            raise ConfigError([f"--config-dir={folder} holds {shared}, as our tree does: give other names"])

    def choices(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return sorted({name for root in self._roots() for name in _yaml_names(root.joinpath(group))})

    def is_group(self, key: str) -> bool:
        """Return whether a key names a group: one of ours, or a folder of the user's."""
        return key in GROUPS or (self.folder is not None and key.isidentifier() and (self.folder / key).is_dir())

    def arguments(self) -> list[str]:
        """Return the options by which another command reads the same."""
        folder = [] if self.folder is None else [f"--config-dir={self.folder.absolute()}"]
        return folder if self.name == "config" else [*folder, f"--config-name={self.name}"]

    def _roots(self) -> Iterator[Traversable]:
        yield files(TREE)
        if self.folder is not None:
            yield self.folder


OURS = Source()


def _yaml_names(folder: Traversable, prefix: str = "") -> Iterator[str]:
    """Yield the names of all YAML files in a folder, those of folders in it as `folder/name`."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            yield from _yaml_names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml")


def compose_config(overrides: Sequence[str], check_device: bool = True, source: Source = OURS) -> RunConfig:
    """Return the configuration that the overrides (`key=value`) stand for; `check_device` as in `load_config`.

    Raises:
        ConfigError: with all mistakes that were found: unknown keys and choices with the nearest name that exists,
            values of a wrong type or out of range, values that do not fit together, a broken YAML file.
    """
    composable, problems, tree = _examined(overrides, source)
    try:
        tree = tree or _composed(composable, source)
        problems += _missing_weights(tree)
        config = load_config(tree, check_device)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    refuse(problems)
    return config


def _missing_weights(tree: DictConfig) -> list[str]:
    """Return a sentence if the file to start from is not there: said here, before torch takes its seconds."""
    path = OmegaConf.select(tree, "model.weights", throw_on_resolution_failure=False)
    return [] if path is None or Path(str(path)).exists() else [
        f"model.weights={path} cannot be read: there is no such file"
    ]  # fmt: skip


def written_out(overrides: Sequence[str], source: Source = OURS) -> list[str]:
    """Return the overrides as Hydra itself reads them, without our short forms; values are not checked.

    Raises:
        ConfigError: with all unknown keys and choices.
    """
    composable, problems, _ = _examined(overrides, source)
    refuse(problems)
    return composable


def output_folder(kind: str, overrides: Sequence[str], source: Source = OURS) -> Path:
    """Return the folder that Hydra's setting `hydra.run.dir` (kind `run`) or `hydra.sweep.dir` (`sweep`) stands for.

    Raises:
        ConfigError: it cannot be resolved, or a name in it is too long.
    """
    single = [_text(each) for each in _parsed_forms(overrides, source) if not each.is_sweep_override()]
    composable, *_ = _examined(single, source)  # what is wrong is told with the cells
    tree = _composed(composable, source, with_hydra=True)
    try:
        folder = str(tree.hydra[kind].dir)
    except OmegaConfBaseException as error:
        raise ConfigError([f"hydra.{kind}.dir cannot be resolved: {str(error).splitlines()[0]}"]) from error
    refuse_long_names(folder)
    return Path(folder)


@cache
def compose_known(overrides: tuple[str, ...]) -> RunConfig:
    """Return what `compose_config` returns for overrides that are known to be right, in a fraction of the time.

    Hydra and OmegaConf take most of the time. So Hydra composes our tree once, and choices and values, each given its
    type once, are put into what it gave.
    """
    forms = [form for override in overrides for form in _known_forms(override)]
    config = deepcopy(_of_choices(tuple(_text(form) for form in forms if OURS.is_group(form.key_or_group))))
    for form in forms:
        if not OURS.is_group(form.key_or_group):
            group, _, name = form.key_or_group.rpartition(".")
            setattr(attrgetter(group)(config) if group else config, name, _typed_value(_text(form)))
    return config


@cache
def _known_forms(override: str) -> list[Override]:
    return _parsed_forms([override], OURS)


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
    tree = deepcopy(_composed_of_ours(()))
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


@cache
def _composed_of_ours(choices: tuple[str, ...]) -> DictConfig:
    """Let Hydra compose choices of our tree, which does not change; cells of a sweep often have the same ones.

    Copy it before anything is put into it.
    """
    return _composed(choices, OURS)


def expand_sweep(overrides: Sequence[str], source: Source = OURS) -> list[list[str]]:
    """Return the overrides of every cell of a sweep: `seed=0,1,2` stands for three, products over all sweeps.

    Of two overrides of one key the later counts. Hydra's own settings are of the sweep, not of its cells.

    Raises:
        ConfigError: overrides that cannot be read, or a sweep without an end or without any value; settings of Hydra's
            own that have no effect.
    """
    parsed = _parsed(overrides)
    refuse(problem for override in parsed if (problem := _hydra_without_effect(override)))
    of_cells = [override for override in parsed if not override.is_hydra_override()]
    alternatives = {override.get_key_element(): _alternatives(override, source) for override in of_cells}
    return [list(cell) for cell in product(*alternatives.values())]


def _alternatives(override: Override, source: Source) -> list[str]:
    """Return an override for each value that a sweep goes through."""
    if not override.is_sweep_override():
        return [_text(override)]
    if not override.is_discrete_sweep():
        raise ConfigError([f"{_text(override)} has no end: list its values, or use range(start,stop,step)"])
    key, value = override.key_or_group, override.value()
    if key in PATH_KEYS and isinstance(value, ChoiceSweep):  # as they are typed, without Hydra's escapes
        return [f"{key}={each.text if isinstance(each, QuotedString) else each}" for each in value.list]
    names = value.filter(source.choices(key)) if isinstance(value, Glob) else [*override.sweep_string_iterator()]
    if not names:
        choices = source.choices(key)
        ways = f"choose {', '.join(choices)}" if choices else f"give one or more, such as {key}=1,2"
        raise ConfigError([f"{_text(override)} stands for no value: {ways}"])
    return [f"{override.get_key_element()}={name}" for name in names]


def _composed(overrides: Sequence[str], source: Source, with_hydra: bool = False) -> DictConfig:
    """Let Hydra compose; `with_hydra` keeps its own settings.

    Raises:
        ConfigError: it cannot; with its reason.
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
    """Set Hydra up; give the override by which it searches the other folder, too.

    It looks for the file named by `--config-name` in the first folder only. Which is first has no other effect, as no
    file of the user's has the name of one of ours.
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


def _examined(overrides: Sequence[str], source: Source) -> tuple[list[str], list[str], DictConfig | None]:
    """Return the overrides that Hydra can compose, a sentence for each other, and what is composed already.

    Choices of groups say which keys there are. So they are composed first; often that is all.
    """
    parsed = _parsed_forms(overrides, source)
    problems = {id(override): problem for override in parsed if (problem := _unknown_choice(override, source))}
    groups = [
        _text(override)
        for override in parsed
        if source.is_group(override.key_or_group) and id(override) not in problems
    ]
    tree = _composed_of_ours(tuple(groups)) if source == OURS else _composed(groups, source)
    found = leaves(tree)
    known, missing = [key for key, _ in found], [key for key, value in found if value == MISSING]
    problems |= {id(item): problem for item in parsed if (problem := _unknown_key(item, source, known, missing))}
    chosen = {override.key_or_group: override.value() for override in parsed}
    if chosen.get("baseline") is not None and chosen.get("placement") == "single_device":  # the default, but asked for
        problems[0] = f"baseline={chosen['baseline']} places its stages itself: drop placement=single_device"
    composable = [_text(override) for override in parsed if id(override) not in problems]
    return composable, [*problems.values()], deepcopy(tree) if composable == groups else None


INSTALLED = {"mode": "modes", "placement": "placements", "model": "models", "dataset": "datasets"}
"""By group the entry points in which packages enter more choices."""


def _parsed_forms(overrides: Sequence[str], source: Source) -> list[Override]:
    return [form for override in _parsed(overrides) for form in _forms(override, source)]


def _parsed(overrides: Sequence[str]) -> list[Override]:
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
    refuse(problems)
    return parsed


def _forms(override: Override, source: Source) -> list[Override]:
    """Write out the short forms.

    `mode=[[1,1],[1,0]]` gives a matrix, `model=NAME` may name one of timm's models, and what is chosen may be of an
    installed package.
    """
    key, value = override.key_or_group, override.value()
    if override.is_add() and key in GROUPS:
        (chosen,) = _parsed([_text(override).removeprefix("+")])  # it has a place already, so that `+` chooses, too
        return _forms(chosen, source)
    if key == "mode" and isinstance(value, list):
        return _parsed(["mode=matrix", f"mode.staleness={override.get_value_string()}"])
    if key not in INSTALLED or not isinstance(value, str) or value in source.choices(key):
        return [override]
    if is_entered(INSTALLED[key], value):
        return _parsed([f"{key}=installed", f"{key}.name={value}"])
    if key == "model" and _is_timm_model(value):
        return _parsed(["model=timm", f"model.name={value}"])
    return [override]


def _is_timm_model(name: str) -> bool:
    from cdp_repro.models.timm_models import is_timm_model  # here: timm takes seconds, and few runs need it

    return is_timm_model(name)


def _text(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


def _unknown_choice(override: Override, source: Source) -> str | None:
    if override.is_sweep_override():
        return f"{_text(override)} has several values: add --multirun, which cdp-train has"
    group, choice = override.key_or_group, override.value()
    if not source.is_group(group):
        return None
    known = source.choices(group)
    choices = [each for each in known if each != "installed"]  # which its names are short for
    if override.is_delete() or choice is None:
        if group in GROUPS and group != "experiment":
            return f"{_text(override)}: every run has one: choose {', '.join(choices)}"
        return None if override.is_delete() else f"{_text(override)} chooses nothing: use ~{group}"
    if choice in known:
        return None
    similar = [*choices, *_timm_model_names()] if group == "model" else choices
    return f"unknown {group} {str(choice)!r}: choose {', '.join(choices)}{nearest(str(choice), similar)}"


def _timm_model_names() -> list[str]:
    from cdp_repro.models.timm_models import timm_model_names  # here: timm takes seconds

    return timm_model_names()


def _unknown_key(override: Override, source: Source, known: Sequence[str], missing: Sequence[str]) -> str | None:
    """Return the problem with a key, if it has one.

    `missing` are keys that a choice leaves to the user, such as `model.name` with `model=timm`.
    """
    key = override.key_or_group
    group, _, rest = key.partition(".")
    if override.is_hydra_override():
        return _hydra_without_effect(override)
    if group == "launcher":
        return f"{key} says how the runs of a sweep start: add --multirun, which cdp-train has"
    if key == "resume":
        return "resume=RUN_DIRECTORY stands alone, with cdp-train (restart=true may stand beside it)"
    if key == "restart":
        return "restart=true needs resume=RUN_DIRECTORY beside it, with cdp-train"
    if group in GROUPS and rest == "name" and key not in missing:
        return f"{key} is set by {group}=..., with what belongs to it"
    if override.is_delete() and key in defaults():
        return f"~{key}: every run has a value of {key}, so that it cannot be deleted: give one, e.g. {example_of(key)}"
    if source.is_group(key) or any(leaf == key or leaf.startswith(f"{key}.") for leaf in known):
        return None
    if key not in (leaf for leaf, _ in leaves(OmegaConf.structured(RunConfig))):
        return f"unknown key {key!r}{nearest(key, [*known, *GROUPS])}"
    if group in GROUPS:
        given = f", or give {EXAMPLES[key]}" if key in EXAMPLES else ""
        return f"{key} has no effect with this {group}{_own_values(group, known)}{given}"
    return None  # a file of the user's lacks it: Hydra says that +key= adds it


def _hydra_without_effect(override: Override) -> str | None:
    """Return a sentence for a setting of Hydra's own that we do not follow."""
    key = override.key_or_group
    if not override.is_hydra_override() or key in HYDRA_KEYS:
        return None
    others = f"those that have are {', '.join(HYDRA_KEYS)}"
    return f"{key} has no effect: runs are started without Hydra's launchers (see launcher=); {others}"


def _own_values(group: str, known: Sequence[str]) -> str:
    """Return the values that the choice of a group has, as the end of a sentence."""
    found = [leaf for leaf in known if leaf.startswith(f"{group}.") and not leaf.endswith(".name")]
    return f"; those that have are {', '.join(found)}" if found else ", which has no values of its own: leave it out"
