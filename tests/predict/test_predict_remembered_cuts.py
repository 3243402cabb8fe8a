"""Cuts that are remembered: the same numbers without torch, and never those of something else."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.predict import cutting, remembered_cuts
from cdp_repro.predict.cutting import cut_model, measure_cut
from cdp_repro.predict.remembered_cuts import stage_cut
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.training.run import train

SETTINGS = ("model=mlp", "model.depth=5", "workers=3", "batch_size=48")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cdp-repro" / "cuts"


@pytest.fixture
def measured(monkeypatch) -> list[RunConfig]:
    """The configurations whose models were cut."""
    found: list[RunConfig] = []
    monkeypatch.setattr(cutting, "measure_cut", lambda config: found.append(config) or measure_cut(config))
    return found


def numbers_of(cut: StageCut) -> dict[str, object]:
    return {field.name: getattr(cut, field.name) for field in fields(StageCut)}


def test_a_plan_takes_what_an_earlier_one_has_measured(cache, measured):
    config = compose_config([*SETTINGS])
    first, second = stage_cut(config), stage_cut(config)
    assert len(measured) == 1 and len([*cache.iterdir()]) == 1
    assert numbers_of(first) == numbers_of(second) == numbers_of(cut_model(config))
    assert repr(first) == repr(second), "types as well"


def test_a_plan_takes_what_a_run_has_measured(cache, measured, tmp_path):
    small = ("dataset=synthetic", "dataset.train_samples=48", "dataset.test_samples=8", "epochs=1", "wandb=disabled")
    config = compose_config([*SETTINGS, *small])
    train(config, tmp_path / "run", ["test"])
    assert numbers_of(stage_cut(config)) == numbers_of(cut_model(config)) and not measured


@pytest.mark.parametrize(
    "other",
    ["model.depth=6", "model.hidden=32", "workers=4", "batch_size=96", "stages=6", "partition=parameters",
     "precision=fp64", "dataset=cifar10", "accumulate=2"],
)  # fmt: skip
def test_another_cut_is_measured(cache, measured, other):
    stage_cut(compose_config([*SETTINGS]))
    config = compose_config([*SETTINGS, other])
    assert numbers_of(stage_cut(config)) == numbers_of(cut_model(config))
    assert len(measured) == 2


@pytest.mark.parametrize("other", ["mode=dp", "optim.lr=0.5", "seed=1", "placement=zero", "mode=cdp_v1"])
def test_what_changes_no_cut_needs_no_measurement(cache, measured, other):
    stage_cut(compose_config([*SETTINGS]))
    stage_cut(compose_config([*SETTINGS, other]))
    assert len(measured) == 1


def test_other_code_and_other_libraries_measure_again(cache, measured, monkeypatch):
    config = compose_config([*SETTINGS])
    stage_cut(config)
    for name, other in (("_version", lambda library: "0.1"), ("code_hash", lambda parts: "changed")):
        monkeypatch.setattr(remembered_cuts, name, other)
        stage_cut(config)
    assert len(measured) == 3


SLICED = ["mode=terapipe", "dataset=text", "model=gpt", "model.width=16", "model.heads=2", "model.context=16"]


BRANCHED = ["model=two_towers", "workers=3", "batch_size=12"]


@pytest.mark.parametrize("settings", [SETTINGS, SLICED, BRANCHED])
def test_a_cut_depends_on_nothing_that_is_not_in_its_name(cache, settings):
    """What `cut_model` reads of a configuration, the hash of its file reads too."""

    class Watched:
        def __init__(self, config):
            self.config, self.read = config, set()

        def __getattr__(self, name):
            self.read.add(name)
            return getattr(self.config, name)

        def reading_whole(self):
            whole = Watched(self.config.reading_whole())
            whole.read = self.read
            return whole

    config = compose_config([*settings])
    cut, hashed = Watched(config), Watched(config)
    cut_model(cut)
    remembered_cuts._determining(hashed)
    assert {"model", "stage_count", "partition", "precision"} <= cut.read
    assert cut.read - {"seed"} <= hashed.read, "the seed draws weights, which cost the same"


def test_a_cut_by_time_is_always_measured(cache, measured):
    config = compose_config([*SETTINGS, "partition=time", "device=cpu"])
    assert stage_cut(config).block_names and stage_cut(config).block_names
    assert len(measured) == 2 and not cache.exists()


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"costs": 3}', None])
def test_a_damaged_file_is_replaced(cache, measured, damage):
    config = compose_config([*SETTINGS])
    stage_cut(config)
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_text(whole[:-40] if damage is None else damage)
    assert numbers_of(stage_cut(config)) == numbers_of(cut_model(config))
    assert path.read_text() == whole and len(measured) == 2


def test_values_that_do_not_fit_together_count_as_damage(cache, measured):
    config = compose_config([*SETTINGS])
    stage_cut(config)
    (path,) = cache.iterdir()
    found = json.loads(path.read_text())
    found["costs"]["forward_bytes"][0] += 1
    path.write_text(json.dumps(found))
    assert numbers_of(stage_cut(config)) == numbers_of(cut_model(config))


def test_without_a_place_to_remember_plans_measure(tmp_path, monkeypatch, measured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = compose_config([*SETTINGS])
    assert numbers_of(stage_cut(config)) == numbers_of(stage_cut(config))
    assert len(measured) == 2


def test_a_user_without_a_home_can_plan(monkeypatch, measured, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # relative: to be ignored
    monkeypatch.setattr(remembered_cuts.Path, "home", no_home)
    monkeypatch.chdir(tmp_path)
    config = compose_config([*SETTINGS])
    assert numbers_of(stage_cut(config)) == numbers_of(stage_cut(config))
    assert len(measured) == 2 and not [*tmp_path.iterdir()]


def test_a_refusal_is_not_remembered(cache):
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be cut into 9 stages"):
            stage_cut(compose_config([*SETTINGS, "stages=9"]))
    assert not cache.exists()
