"""Overrides that are known to be right: the same configuration as Hydra's, without Hydra for each."""

from __future__ import annotations

from itertools import chain, zip_longest

import hydra
import pytest
from omegaconf import OmegaConf

from cdp_repro.config import RunConfig, compose, known, source
from cdp_repro.studies.catalog import STUDIES

GIVEN = {
    "mode=matrix": ["mode.staleness=[[1,1],[1,0]]"],
    "model=timm": ["model.name=resnet10t"],
}
"""Values that a choice leaves to the user."""

CHOICES = {group: [f"{group}={name}" for name in source.OURS.choices(group)] for group in source.GROUPS}
TOGETHER = [tuple(choice for choice in each if choice) for each in zip_longest(*CHOICES.values())]


def by_hydra(overrides):
    with hydra.initialize_config_module(source.TREE, version_base="1.3"):
        tree = hydra.compose("config", overrides)
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), tree))


@pytest.mark.parametrize(
    "choices", [*TOGETHER, ("experiment=paper/cifar10_resnet18", "optim=muon", "dataset=digits"), ()], ids=" ".join
)
def test_the_configuration_is_hydras(choices):
    values = [value for choice in choices for value in GIVEN.get(choice, ())]
    overrides = (*choices, *values, "optim.lr=1", "batch_size=24", "stages=null")
    assert repr(known.compose_known(overrides)) == repr(by_hydra([*overrides])), "repr tells 1 from 1.0"


def test_every_choice_is_among_them():
    assert {*chain(*TOGETHER)} == {*chain(*CHOICES.values())}


def test_hydra_composes_once_for_the_cells_of_all_studies(monkeypatch):
    """It takes a fifth of a second for one: `cdp-report check` asks for the configuration of each."""
    calls = []
    monkeypatch.setattr(
        compose, "compose", lambda *args, **options: calls.append(args) or hydra.compose(*args, **options)
    )
    for cached in (known.compose_known, known._of_choices, compose.composed_of_ours):
        cached.cache_clear()
    assert len({repr(cell.config) for study in STUDIES.values() for cell in study.cells}) > 100
    assert len(calls) == 1
