"""The command line of the sweeps over studies, as their scripts hand it on."""

from __future__ import annotations

import pytest

from cdp_repro.cli import sweep
from cdp_repro.config import ConfigError
from cdp_repro.studies.study import Cell, Study

TWO = Study("two", "accuracy", "two modes", (Cell(("mode=dp",)), Cell(("mode=cdp_v2",))))


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setitem(sweep.STUDIES, TWO.name, TWO)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sweep.parsed(arguments, ["two"])
    return caught.value.problems


def test_all_mistakes_are_told_at_once():
    said = problems("--jobs=2", "--seeds=0", "--run=7", "--slurm=x.sh", "device=cpu", "wandb=of", "dataset.root=data")
    begins = ["--seeds=0: ", "device=cpu is ", "wandb=of: ", "dataset.root has ", "--run=7: there are 2 ", "--slurm= "]
    assert len(said) == len(begins)
    assert all(problem.startswith(begin) for problem, begin in zip(said, begins, strict=True))


def test_what_an_unknown_study_might_know_is_no_mistake():
    (said,) = problems("tow", "dataset.root=data", "--run=7")
    assert said.startswith("unknown study 'tow'") and said.endswith("did you mean 'two'?")


KEYS = (
    "wandb=disabled", "wandb_project=p", "keep_checkpoints=1", "checkpoint_every_steps=5", "log_every_steps=5",
    "timeout_seconds=100", "grace_seconds=5",
)  # fmt: skip


def test_a_key_that_is_given_twice_is_told():
    assert problems("wandb=disabled", "wandb=online") == ["wandb is given twice: leave one out"]


def test_every_study_takes_keys_that_no_data_set_decides():
    """Alone: beside another study, a key that is refused here would be dropped in silence."""
    for name in sweep.STUDIES:
        options = sweep.parsed(KEYS, [name])
        assert options.passed_on == {name: KEYS}
