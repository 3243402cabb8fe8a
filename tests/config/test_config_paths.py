"""Paths as people type them on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config, output_folder
from cdp_repro.config.known import compose_known
from cdp_repro.config.paths import PATH_KEYS, quoted_for_hydra, shortened, typed_path
from cdp_repro.config.sweep_cells import expand_sweep

NAMES = (
    "runs/mine", "früße", "two words", "it's", "a,b", "a=b", "(x)", "{x}", "[x]",
    "a:b", 'say "so"', "back\\slash", "end\\",
    "\\'", "7", "true", "#1", "%", "~x/y", "'", "''",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_arrives_as_it_was_typed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["dataset=cifar10", *(f"{key}={name}" for key in PATH_KEYS)]
    config = compose_known((*overrides,))
    assert config.run_dir == config.dataset.root == config.program == typed_path(name)
    assert name in ("''", config.run_dir), "nothing but quotes around nothing is changed"
    assert expand_sweep(overrides) == [[overrides[0], *map(quoted_for_hydra, overrides[1:])]]
    if name in ("früße", "it's", "a,b"):
        Path(name).touch()  # weights must be there
        assert compose_config(overrides) == config


def test_the_own_folder_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/you")
    assert compose_config(["run_dir=~/x y"]).run_dir == "/home/you/x y"
    assert compose_config(["dataset=cifar10", "dataset.root=~/data"]).dataset.root == "/home/you/data"


def test_what_hydra_takes_out_of_quotes_still_is(monkeypatch):
    assert compose_config(["run_dir='two words'"]).run_dir == "two words"
    assert compose_config([r"run_dir='it\'s'"]).run_dir == "it's"
    assert compose_config(["dataset=cifar10", "dataset.root=null"]).dataset.root is None
    assert compose_config(["mode=cdp_v1", "run_dir=runs/${mode.name}"]).run_dir == "runs/cdp_v1"


@pytest.mark.parametrize("name", NAMES)
def test_quotes_for_hydra_are_taken_off_again(name):
    assert typed_path(quoted_for_hydra(f"run_dir={name}").removeprefix("run_dir=")) == typed_path(name)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match=r"udcff.* is not text in UTF-8"):
        compose_config(["run_dir=\udcff"])


def test_only_paths_are_taken_as_they_stand():
    assert expand_sweep(["seed=0,1", "run_dir=a,b"]) == [["seed=0", "run_dir='a,b'"], ["seed=1", "run_dir='a,b'"]]
    assert expand_sweep(["dataset=cifar10", "dataset.root=choice(/data/a,'b, c')"]) == [
        ["dataset=cifar10", "dataset.root=/data/a"], ["dataset=cifar10", "dataset.root=b, c"]
    ]  # fmt: skip
    assert quoted_for_hydra("model=resnet8") == "model=resnet8"
    assert Path(typed_path("x")) == Path("x")


def test_a_name_that_no_file_system_takes_is_refused_with_both_numbers():
    longest, beyond = "ü" * 127 + "x", "ü" * 128
    assert typed_path(f"runs/{longest}/run") == f"runs/{longest}/run"
    said = r"has 256 bytes: use at most 255, such as ü{20}$"
    with pytest.raises(ConfigError, match=said):
        typed_path(f"runs/{beyond}/run")
    with pytest.raises(ConfigError, match=rf"(?s){said[:-1]}.*'epochs' is not of the form"):
        compose_config([f"run_dir={beyond}", "epochs"])
    with pytest.raises(ConfigError, match=r"the path .* has 5000 bytes: use at most 4095"):
        typed_path("x/" * 2500)
    with pytest.raises(ConfigError, match="has 256 bytes: use at most 255"):
        output_folder("run", [f"hydra.run.dir={'x' * 256}"])


def test_a_name_of_ours_that_is_too_long_is_cut_and_told_from_others():
    assert shortened("seed=0", 255) == "seed=0"
    one, other = (shortened("ü" * 200 + end, 255) for end in "ab")
    assert one != other and one.startswith("ü" * 100) and max(len(each.encode()) for each in (one, other)) <= 255
