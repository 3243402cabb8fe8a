"""`launcher=` on the command line of a sweep: what is asked, apart from what the runs are."""

from __future__ import annotations

import pytest

from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config
from cdp_repro.config.sweep_launcher import LocalLauncher, SlurmLauncher, launcher_of, of_runs


def test_without_a_word_the_runs_start_here_one_by_one():
    words = ["seed=0,1", "mode=dp"]
    assert (launcher_of(words), of_runs(words)) == (LocalLauncher(jobs=1), words)


def test_its_values_are_typed_and_the_rest_is_of_the_runs():
    words = ["launcher=slurm", "seed=0,1", "launcher.nodes=2", "launcher.time=1:30:00", "launcher.partition=gpu"]
    launcher, rest = launcher_of(words), of_runs(words)
    assert launcher == SlurmLauncher(partition="gpu", time="1:30:00", nodes=2)
    assert rest == ["seed=0,1"]
    assert launcher_of(["launcher=local", "launcher.jobs=2"]) == LocalLauncher(jobs=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher=slrum"], "unknown launcher 'slrum': choose local, slurm; did you mean 'slurm'?"),
        (["launcher=slurm", "launcher.partitoin=x"], "has no launcher.partitoin: it has launcher.partition"),
        (["launcher.partition=x"], "launcher=local has no launcher.partition: it has launcher.jobs"),
        (["launcher.jobs=many"], "launcher.jobs=many: Value 'many'"),
        (["launcher.jobs=0"], "launcher.jobs=0: must be 1 or more"),
        (["launcher=slurm", "launcher.nodes=0", "launcher.at_once=0"], "launcher.at_once=0: must be 1 or more"),
        (["launcher.jobs=1,2"], "jobs=1,2: a sweep starts in one way: give one value, such as launcher.jobs=1"),
        (["launcher=slurm", "launcher.at_once=range(1,3)"], "give one value, such as launcher.at_once=1"),
        (["launcher=local,slurm"], "names several, but a sweep starts in one way: choose one of local, slurm"),
        (["+launcher.jobs=2"], ": settings of the launcher take neither + nor ~: write launcher.jobs=2"),
        (["++launcher=slurm", "launcher.nodes=2"], "neither + nor ~: write launcher=slurm"),
        (["~launcher.jobs"], "neither + nor ~: leave it out for its default"),
    ],
)
def test_mistakes_are_explained(words, message):
    with pytest.raises(ConfigError) as caught:
        launcher_of(words)
    assert message in str(caught.value)


def test_all_its_mistakes_are_told_at_once_and_those_alone():
    with pytest.raises(ConfigError) as caught:
        launcher_of(["+launcher=slurm", "launcher.nodes=1,2", "launcher.at_once=0", "launcher.partition=a,b"])
    said = ["+launcher=slurm", "launcher.nodes=1,2", "launcher.at_once=0"]
    assert [problem.partition(":")[0] for problem in caught.value.problems] == said


def test_several_partitions_are_for_sbatch_to_choose_from():
    words = ["launcher=slurm", "launcher.partition=a,b", "seed=0,1"]
    launcher, rest = launcher_of(words), of_runs(words)
    assert launcher == SlurmLauncher(partition="a,b") and rest == ["seed=0,1"]


def test_it_is_for_sweeps_only():
    with pytest.raises(ConfigError, match="launcher says how the runs of a sweep start: add --multirun"):
        compose_config(["launcher=slurm"])
