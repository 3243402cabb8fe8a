"""Finds YAML files: in our own tree, and in a folder of the user's beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from cdp_repro.config.errors import ConfigError, nearest

TREE = "cdp_repro.config.hydra_tree"
"""The package with our YAML files."""

GROUPS = ("mode", "dataset", "model", "placement", "optim", "delay", "experiment")


@dataclass(frozen=True)
class Source:
    """Where configurations are read: in our tree, and in a folder of the user's if there is one.

    Raises:
        ConfigError: the folder or the file does not exist, or the folder has a file with the name of one of ours.
    """

    folder: Path | None = None
    """`--config-dir`: a folder laid out like our tree."""
    name: str = "config"
    """`--config-name`: the top file, whose `defaults` list the files to compose."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            self._check_folder(self.folder)
        if self.name == "config":
            return
        names = [name for root in self._roots() for name in _yaml_names(root)]
        if self.name not in names:
            where = "our tree" if self.folder is None else f"our tree and {self.folder}"
            similar = nearest(self.name, [name for name in names if "/" not in name])
            raise ConfigError(
                [
                    f"--config-name={self.name}: there is no {self.name}.yaml in {where}{similar}; give the folder of "
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
        """Whether a key names a group: one of ours, or a folder inside the user's."""
        return key in GROUPS or (self.folder is not None and key.isidentifier() and (self.folder / key).is_dir())

    def arguments(self) -> list[str]:
        """Return the options with which another command reads the same files."""
        folder = [] if self.folder is None else [f"--config-dir={self.folder.absolute()}"]
        return folder if self.name == "config" else [*folder, f"--config-name={self.name}"]

    def _roots(self) -> Iterator[Traversable]:
        yield files(TREE)
        if self.folder is not None:
            yield self.folder


OURS = Source()


def _yaml_names(folder: Traversable, prefix: str = "") -> Iterator[str]:
    """Yield the names of all YAML files in a folder, without `.yaml`; in subfolders as `folder/name`."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            yield from _yaml_names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml")
